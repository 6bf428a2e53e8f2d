// Looks at a CPU tensor of torch or an array of numpy without copying it and without calling Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "dtype.h"
#include "layout.h"

namespace neoflex {

// DLPack's C exchange interface (dlpack.h, version 1.2 and later), as far as it is used here. A tensor type offers it
// in its attribute __dlpack_c_exchange_api__; a look through it takes 0.1 us, one through __dlpack__ of torch 2.
struct DlpackExchangeApi {
    std::uint32_t major_version;
    std::uint32_t minor_version;
    DlpackExchangeApi* older;
    void* unused[3];
    int (*borrow)(void* object, nanobind::dlpack::dltensor* view);  // 0 where it succeeds; valid as long as the object
    void* current_stream;
};

// Null where the type offers none of this version.
inline const DlpackExchangeApi* exchange_api(PyTypeObject* type) {
    // Under the GIL. Types live as long as the interpreter, or at least as long as tensors of them are submitted.
    static PyTypeObject* known_type = nullptr;
    static const DlpackExchangeApi* known_api = nullptr;
    if (type == known_type) return known_api;
    const DlpackExchangeApi* api = nullptr;
    nanobind::object capsule = nanobind::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", nanobind::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
        api = static_cast<const DlpackExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (api != nullptr && api->major_version != 1) api = api->older;
    }
    known_type = type;
    known_api = api;
    return api;
}

// A tensor's memory for the length of a call.
class BorrowedTensor {
  public:
    // Throws PlaneError, naming the tensor, where it does not lie in this machine's memory as `dtype` with `ndim` axes,
    // the last of them contiguous.
    BorrowedTensor(nanobind::handle tensor, const char* name, DType dtype, int ndim) : name_(name) {
        const DlpackExchangeApi* api = exchange_api(Py_TYPE(tensor.ptr()));
        if (api != nullptr) {
            if (api->borrow(tensor.ptr(), &view_) != 0) throw nanobind::python_error();
        } else {
            require(nanobind::try_cast(tensor, array_), "is no writable array");
            borrow_array();
        }
        require(view_.device.device_type == nanobind::device::cpu::value, "does not lie in the CPU's memory");
        require(is(dtype), "is not of the exchange's type");
        require(view_.ndim == ndim, "has another number of axes");
        require(view_.strides[ndim - 1] == 1 || view_.shape[ndim - 1] == 1, "is not contiguous in its last axis");
    }

    std::int64_t size(int axis) const { return view_.shape[axis]; }
    std::int64_t stride_bytes(int axis) const { return view_.strides[axis] * (view_.dtype.bits / 8); }
    std::byte* data() const { return static_cast<std::byte*>(view_.data) + view_.byte_offset; }

    void require(bool holds, const char* what) const {
        if (!holds) throw PlaneError(std::string(name_) + " " + what);
    }

  private:
    void borrow_array() {
        view_.data = const_cast<void*>(array_.data());
        view_.device = {array_.device_type(), array_.device_id()};
        view_.ndim = static_cast<std::int32_t>(array_.ndim());
        view_.dtype = array_.dtype();
        view_.shape = const_cast<std::int64_t*>(array_.shape_ptr());
        view_.strides = const_cast<std::int64_t*>(array_.stride_ptr());
    }

    bool is(DType dtype) const {
        using nanobind::dlpack::dtype_code;
        const auto code = static_cast<dtype_code>(view_.dtype.code);
        if (view_.dtype.lanes != 1 || view_.dtype.bits != 8 * dtype_bytes(dtype)) return false;
        // numpy knows no bf16: its bits come as uint16.
        if (dtype == DType::bf16) return code == dtype_code::Bfloat || code == dtype_code::UInt;
        return code == dtype_code::Float;
    }

    const char* name_;
    nanobind::ndarray<> array_;
    nanobind::dlpack::dltensor view_;
};

}  // namespace neoflex
