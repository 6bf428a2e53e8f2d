// A torch tensor or a numpy array as Python hands it over: address, shape, strides and type, in well under 1 us.
//
// nanobind's own ndarray takes 2 us for a torch tensor, by way of DLPack; a layer's hot path has several.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "dtype.h"

namespace neoflex {

struct TensorView {
    static constexpr std::size_t max_ndim = 5;

    std::byte* data;
    std::size_t ndim;
    std::int64_t shape[max_ndim];
    std::int64_t stride[max_ndim];  // elements
    DType dtype;
};

namespace tensor_view_detail {

namespace nb = nanobind;

inline constexpr const char* known_types =
    "arrays must be float32, float16, bfloat16 or, for its bits, uint16, or int8";

inline DType dtype_of_torch(nb::handle dtype) {
    // A torch dtype is one object for ever.
    const auto find = [](const char* name) {
        return nb::object(nb::module_::import_("torch").attr(name)).release().ptr();
    };
    static const PyObject* const known[] = {find("float32"), find("float16"), find("bfloat16"), find("int8")};
    if (dtype.ptr() == known[0]) return DType::fp32;
    if (dtype.ptr() == known[1]) return DType::fp16;
    if (dtype.ptr() == known[2]) return DType::bf16;
    if (dtype.ptr() == known[3]) return DType::int8;
    throw nb::type_error(known_types);
}

inline TensorView view_torch(nb::handle tensor) {
    if (!nb::cast<bool>(tensor.attr("is_cpu"))) throw nb::type_error("tensors must lie in the CPU's memory");
    const nb::tuple shape = nb::borrow<nb::tuple>(tensor.attr("shape"));
    const nb::tuple stride = nb::borrow<nb::tuple>(tensor.attr("stride")());
    if (shape.size() > TensorView::max_ndim) throw nb::value_error("too many axes");
    TensorView view{reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")())), shape.size(), {},
                    {}, dtype_of_torch(tensor.attr("dtype"))};
    for (std::size_t i = 0; i < view.ndim; ++i) {
        view.shape[i] = nb::cast<std::int64_t>(shape[i]);
        view.stride[i] = nb::cast<std::int64_t>(stride[i]);
    }
    return view;
}

inline TensorView view_numpy(nb::handle array) {
    const auto found = nb::cast<nb::ndarray<nb::numpy, nb::device::cpu>>(array);
    if (found.ndim() > TensorView::max_ndim) throw nb::value_error("too many axes");
    TensorView view{static_cast<std::byte*>(found.data()), found.ndim(), {}, {}, DType::fp32};
    // numpy has no bf16 and shows its bits as uint16.
    if (found.dtype() == nb::dtype<std::uint16_t>()) {
        view.dtype = DType::bf16;
    } else if (found.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) &&
               found.dtype().bits == 16) {
        view.dtype = DType::fp16;
    } else if (found.dtype() == nb::dtype<std::int8_t>()) {
        view.dtype = DType::int8;
    } else if (found.dtype() != nb::dtype<float>()) {
        throw nb::type_error(known_types);
    }
    for (std::size_t i = 0; i < view.ndim; ++i) {
        view.shape[i] = static_cast<std::int64_t>(found.shape(i));
        view.stride[i] = found.stride(i);
    }
    return view;
}

}  // namespace tensor_view_detail

// Throws type_error where it is of another type or not in the CPU's memory. Valid while the tensor lives.
inline TensorView view_of(nanobind::handle array) {
    return nanobind::hasattr(array, "data_ptr") ? tensor_view_detail::view_torch(array)
                                                : tensor_view_detail::view_numpy(array);
}

}  // namespace neoflex
