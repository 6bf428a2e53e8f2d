// What Python hands to the linear kernels, and the names it has for their types.
#pragma once

#include <nanobind/ndarray.h>

#include <optional>
#include <string>

#include "linear.h"

namespace neoflex {

namespace nb = nanobind;

using Vector = nb::ndarray<const float, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;
using OutMatrix = nb::ndarray<float, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;

inline DType dtype_named(const std::string& name) {
    if (name == "fp32") return DType::fp32;
    if (name == "fp16") return DType::fp16;
    if (name == "bf16") return DType::bf16;
    throw nb::value_error("the weight type is fp32, fp16 or bf16");
}

inline const char* name_of(DType type) {
    if (type == DType::fp16) return "fp16";
    return type == DType::bf16 ? "bf16" : "fp32";
}

inline Activation activation_named(const std::string& name) {
    if (name == "none") return Activation::none;
    if (name == "relu") return Activation::relu;
    if (name == "silu_gated") return Activation::silu_gated;
    if (name == "gelu_tanh_gated") return Activation::gelu_tanh_gated;
    throw nb::value_error("the activation is none, relu, silu_gated or gelu_tanh_gated");
}

inline void require(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

inline const float* vector_of(const std::optional<Vector>& values, std::int32_t size, const char* what) {
    if (!values) return nullptr;
    require(static_cast<std::int32_t>(values->shape(0)) == size, what);
    return values->data();
}

inline const float* matrix_of(const Matrix& values, std::int32_t rows, std::int32_t columns, const char* what) {
    require(static_cast<std::int32_t>(values.shape(0)) == rows && static_cast<std::int32_t>(values.shape(1)) == columns,
            what);
    return values.data();
}

}  // namespace neoflex
