// Python's view of the linear kernels: one packed matrix by itself. The linear part of a decoder: decoder_module.cpp.
#include "linear_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "linear_arrays.h"

using namespace nanobind::literals;

namespace neoflex {
namespace {

// One matrix with its memory.
struct Linear {
    WeightArena arena;
    PackedMatrix matrix;

    Linear(const Matrix& weights, const std::optional<Vector>& bias, const std::string& dtype,
           const std::string& activation,
           const std::string& instruction_set)
        : matrix(choose_linear_kernel(instruction_set), arena, weights.data(),
                 vector_of(bias, static_cast<std::int32_t>(weights.shape(0)), "bias does not fit the weights"),
                 static_cast<std::int32_t>(weights.shape(0)), static_cast<std::int32_t>(weights.shape(1)),
                 type_named(dtype), activation_named(activation)) {}
};

void multiply(const Linear& linear, const Matrix& rows, const std::optional<Matrix>& residual, const OutMatrix& out,
              ThreadPool& threads) {
    const PackedMatrix& matrix = linear.matrix;
    const auto n = static_cast<std::int32_t>(rows.shape(0));
    matrix_of(rows, n, matrix.depth(), "rows do not fit the weights");
    require(static_cast<std::int32_t>(out.shape(0)) == n &&
                static_cast<std::int32_t>(out.shape(1)) == matrix.num_outputs(),
            "out does not fit");
    require(!residual || matrix.activation() == Activation::none, "an activated product takes no residual");
    const float* added = residual ? matrix_of(*residual, n, matrix.num_outputs(), "residual does not fit") : nullptr;
    nb::gil_scoped_release release;
    threads.resize();
    ProductResources resources{threads, {}};
    Product(matrix, rows.data(), n, resources).run(added, out.data());
}

using Tokens = nb::ndarray<std::int64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using OutVector = nb::ndarray<float, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

void argmax_rows(const Matrix& rows, const Tokens& places, const OutVector& maxima, ThreadPool& threads,
                 const std::string& instruction_set) {
    const std::size_t n = rows.shape(0);
    const std::size_t width = rows.shape(1);
    require(width > 0 && places.shape(0) == n && maxima.shape(0) == n, "places and maxima do not fit the rows");
    const LinearKernel& kernel = choose_linear_kernel(instruction_set);
    const float* data = rows.data();
    std::int64_t* to_places = places.data();
    float* to_maxima = maxima.data();
    nb::gil_scoped_release release;
    threads.resize();
    threads.run(static_cast<std::uint32_t>(n), n * width >= 100'000, [&](std::uint32_t row, int) {
        to_places[row] = kernel.argmax(data + row * width, static_cast<std::int32_t>(width), to_maxima + row);
    });
}

}  // namespace

void bind_linear(nb::module_& m) {
    // A process keeps one pool, and what computes on it, until it ends.
    nb::set_leak_warnings(false);
    nb::class_<Linear>(m, "PackedLinear", "One weight matrix, packed for products with few or many rows.")
        .def(nb::init<const Matrix&, const std::optional<Vector>&, const std::string&, const std::string&, const std::string&>(),
             "weights"_a, "bias"_a.none(), "dtype"_a, "activation"_a, "instruction_set"_a,
             "Copies weights [out, in], rounded to `dtype`: fp32, fp16, bf16, int8 or int4. `activation` is what a\n"
             "product is made to be: none, relu, silu_gated or gelu_tanh_gated, with the gates in the first half of the rows.")
        .def_prop_ro("num_bytes", [](const Linear& self) { return self.matrix.num_bytes(); }, "Bytes held.")
        .def("multiply", &multiply, "rows"_a, "residual"_a.none(), "out"_a, "threads"_a,
             "out [n, num_outputs] = rows [n, in] . weights^T + bias + residual [n, num_outputs].");
    bind_decoder(m);
    m.def("argmax_rows", &argmax_rows, "rows"_a, "places"_a, "maxima"_a, "threads"_a, "instruction_set"_a,
          "places [n] = the first place of the largest element of each of rows [n, width], maxima [n] = that element,\n"
          "or NaN where the row has one.");
    m.def(
        "runnable_linear_instruction_sets",
        [] {
            std::vector<std::string> names;
            for (const LinearKernel* kernel : runnable_linear_kernels()) names.emplace_back(kernel->name);
            return names;
        },
        "Names, slowest first.");
}

}  // namespace neoflex
