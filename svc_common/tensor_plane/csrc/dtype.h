// Element types of KV and of the exchange slots. Holds nothing that a compiler could emit as code: the kernels, each
// compiled for another instruction set, include it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace neoflex {

// int8 is a type of KV only: such numbers mean something together with the scale of their block and head.
enum class DType : std::uint32_t { fp32 = 1, fp16 = 2, bf16 = 3, int8 = 4 };

constexpr std::size_t dtype_bytes(DType dtype) { return dtype == DType::fp32 ? 4 : dtype == DType::int8 ? 1 : 2; }

}  // namespace neoflex
