// What the extensions take from Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "decode_attention.h"

namespace neoflex {

namespace nb = nanobind;

using Int32Vector = nanobind::ndarray<const std::int32_t, nanobind::shape<-1>, nanobind::c_contig, nanobind::device::cpu>;
using Int32Matrix = nanobind::ndarray<const std::int32_t, nanobind::shape<-1, -1>, nanobind::c_contig, nanobind::device::cpu>;

inline DecodeBatch make_batch(const Int32Vector& context_tokens, const Int32Matrix& block_tables) {
    if (context_tokens.shape(0) != block_tables.shape(0))
        throw nb::value_error("context_tokens and block_tables differ in their number of sequences");
    return {static_cast<std::int32_t>(context_tokens.shape(0)), context_tokens.data(), block_tables.data(),
            static_cast<std::int32_t>(block_tables.shape(1))};
}

}  // namespace neoflex
