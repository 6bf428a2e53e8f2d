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

inline WeightType type_named(const std::string& name) {
    if (name == "fp32") return WeightType::fp32;
    if (name == "fp16") return WeightType::fp16;
    if (name == "bf16") return WeightType::bf16;
    if (name == "int8") return WeightType::int8;
    if (name == "int4") return WeightType::int4;
    throw nb::value_error("the weight type is fp32, fp16, bf16, int8 or int4");
}

inline const char* name_of(WeightType type) {
    constexpr const char* names[] = {"fp32", "fp16", "bf16", "int8", "int4"};
    return names[static_cast<int>(type) - 1];
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
