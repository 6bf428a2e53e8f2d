// Python's view of the linear kernels: one packed matrix by itself, and the linear part of a decoder.
#include "linear_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "decoder_linear.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neoflex {
namespace {

using Vector = nb::ndarray<const float, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;
using OutMatrix = nb::ndarray<float, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;

WeightType type_named(const std::string& name) {
    if (name == "fp32") return WeightType::fp32;
    if (name == "fp16") return WeightType::fp16;
    if (name == "bf16") return WeightType::bf16;
    if (name == "int8") return WeightType::int8;
    if (name == "int4") return WeightType::int4;
    throw nb::value_error("the weight type is fp32, fp16, bf16, int8 or int4");
}

Activation activation_named(const std::string& name) {
    if (name == "none") return Activation::none;
    if (name == "relu") return Activation::relu;
    if (name == "silu_gated") return Activation::silu_gated;
    if (name == "gelu_tanh_gated") return Activation::gelu_tanh_gated;
    throw nb::value_error("the activation is none, relu, silu_gated or gelu_tanh_gated");
}

void require(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

const float* vector_of(const std::optional<Vector>& values, std::int32_t size, const char* what) {
    if (!values) return nullptr;
    require(static_cast<std::int32_t>(values->shape(0)) == size, what);
    return values->data();
}

const float* matrix_of(const Matrix& values, std::int32_t rows, std::int32_t columns, const char* what) {
    require(static_cast<std::int32_t>(values.shape(0)) == rows && static_cast<std::int32_t>(values.shape(1)) == columns,
            what);
    return values.data();
}

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

template <typename T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

NormParameters norm_of(const std::optional<Vector>& weight, const std::optional<Vector>& bias, std::int32_t size) {
    return {vector_of(weight, size, "a norm does not fit"), vector_of(bias, size, "a norm's bias does not fit")};
}

MlpParameters mlp_of(const DecoderLinear& decoder, const Matrix& up, const std::optional<Vector>& up_bias,
                     const Matrix& down, const std::optional<Vector>& down_bias) {
    const std::int32_t hidden = decoder.shape().hidden_size;
    const auto inner = static_cast<std::int32_t>(down.shape(1));
    const std::int32_t up_rows = inner * (is_gated(decoder.shape().activation) ? 2 : 1);
    return {inner, matrix_of(up, up_rows, hidden, "up does not fit"), vector_of(up_bias, up_rows, "up_bias does not fit"),
            matrix_of(down, hidden, inner, "down does not fit"), vector_of(down_bias, hidden, "down_bias does not fit")};
}

void add_layer(DecoderLinear& decoder, const Vector& attention_norm, const std::optional<Vector>& attention_norm_bias,
               const Matrix& qkv, const std::optional<Vector>& qkv_bias, const std::optional<Vector>& q_norm,
               const std::optional<Vector>& k_norm, const Matrix& output, const std::optional<Vector>& output_bias,
               const std::optional<Vector>& post_attention_norm, const Vector& mlp_norm,
               const std::optional<Vector>& mlp_norm_bias, const std::optional<Vector>& post_mlp_norm) {
    const DecoderShape& shape = decoder.shape();
    const std::int32_t hidden = shape.hidden_size;
    decoder.add_layer({
        norm_of(attention_norm, attention_norm_bias, hidden),
        matrix_of(qkv, shape.qkv_size(), hidden, "qkv does not fit"),
        vector_of(qkv_bias, shape.qkv_size(), "qkv_bias does not fit"),
        vector_of(q_norm, shape.head_dim, "q_norm does not fit"),
        vector_of(k_norm, shape.head_dim, "k_norm does not fit"),
        matrix_of(output, hidden, shape.q_size(), "output does not fit"),
        vector_of(output_bias, hidden, "output_bias does not fit"),
        norm_of(post_attention_norm, std::nullopt, hidden),
        norm_of(mlp_norm, mlp_norm_bias, hidden),
        norm_of(post_mlp_norm, std::nullopt, hidden),
    });
}

void set_router(DecoderLinear& decoder, const Matrix& router, std::int32_t experts_per_token, bool normalised) {
    const auto num_experts = static_cast<std::int32_t>(router.shape(0));
    require(experts_per_token >= 1 && experts_per_token <= num_experts, "experts_per_token does not fit the router");
    decoder.set_router(matrix_of(router, num_experts, decoder.shape().hidden_size, "router does not fit"), num_experts,
                       experts_per_token, normalised);
}

void set_vocabulary(DecoderLinear& decoder, const Matrix& embedding, const std::optional<Matrix>& head,
                    const Vector& final_norm, const std::optional<Vector>& final_norm_bias) {
    const std::int32_t hidden = decoder.shape().hidden_size;
    const auto vocab_size = static_cast<std::int32_t>(embedding.shape(0));
    decoder.set_vocabulary(matrix_of(embedding, vocab_size, hidden, "embedding does not fit"),
                           head ? matrix_of(*head, vocab_size, hidden, "head does not fit") : nullptr,
                           norm_of(final_norm, final_norm_bias, hidden), vocab_size);
}

void bind_decoder(nb::module_& m) {
    nb::class_<DecoderLinear>(m, "DecoderLinear",
                              "The linear part of a decoder. Activations are fp32, in dense rows, and come as\n"
                              "addresses of memory that the caller has checked: this is called twice per layer.")
        .def(
            "__init__",
            [](DecoderLinear* self, std::int32_t hidden_size, std::int32_t num_q_heads, std::int32_t num_kv_heads,
               std::int32_t head_dim, std::int32_t rotary_dim, float norm_eps, const std::string& activation,
               const std::string& dtype, ThreadPool& threads, const std::string& instruction_set) {
                new (self) DecoderLinear({hidden_size, num_q_heads, num_kv_heads, head_dim, rotary_dim, norm_eps,
                                          activation_named(activation)},
                                         type_named(dtype), threads, choose_linear_kernel(instruction_set));
            },
            nb::kw_only(), "hidden_size"_a, "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a, "rotary_dim"_a,
            "norm_eps"_a, "activation"_a, "dtype"_a, "threads"_a, "instruction_set"_a, nb::keep_alive<1, 10>(),
            "`dtype` is the weights': fp32, fp16, bf16, int8 or int4; a rotary_dim of 0: heads are not rotated.")
        .def("add_layer", &add_layer, nb::kw_only(), "attention_norm"_a, "attention_norm_bias"_a.none(), "qkv"_a,
             "qkv_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), "output"_a, "output_bias"_a.none(),
             "post_attention_norm"_a.none(), "mlp_norm"_a, "mlp_norm_bias"_a.none(), "post_mlp_norm"_a.none(),
             "Copies the weights of the next layer, all but its MLP. Matrices are [out, in]; norms with a bias are\n"
             "LayerNorm, others RMSNorm.")
        .def(
            "set_mlp",
            [](DecoderLinear& self, const Matrix& up, const std::optional<Vector>& up_bias, const Matrix& down,
               const std::optional<Vector>& down_bias) { self.set_mlp(mlp_of(self, up, up_bias, down, down_bias)); },
            nb::kw_only(), "up"_a, "up_bias"_a.none(), "down"_a, "down_bias"_a.none(),
            "Of the last layer added. Where the activation is gated, `up` has the gates first.")
        .def("set_router", &set_router, "router"_a, "experts_per_token"_a, "normalised"_a,
             "Instead of set_mlp: router [num_experts, hidden_size]; all its experts follow.")
        .def(
            "add_expert",
            [](DecoderLinear& self, const Matrix& up, const Matrix& down) {
                self.add_expert(mlp_of(self, up, std::nullopt, down, std::nullopt));
            },
            "up"_a, "down"_a, "The next expert of the last layer added, its matrices as for set_mlp.")
        .def(
            "set_shared_expert",
            [](DecoderLinear& self, const Matrix& up, const Matrix& down, const Vector& gate) {
                const float* weights = vector_of(gate, self.shape().hidden_size, "gate does not fit");
                self.set_shared_expert(mlp_of(self, up, std::nullopt, down, std::nullopt), weights);
            },
            "up"_a, "down"_a, "gate"_a, "That all tokens go through, by the sigmoid of gate [hidden_size].")
        .def("set_vocabulary", &set_vocabulary, "embedding"_a, "head"_a.none(), "final_norm"_a,
             "final_norm_bias"_a.none(),
             "Copies embedding and head, each [vocab_size, hidden_size]; None: the head is the embedding.")
        .def_prop_ro("num_bytes", &DecoderLinear::num_bytes, "Bytes of weights held.")
        .def(
            "embed",
            [](DecoderLinear& self, std::uintptr_t token_ids, std::int32_t n, std::uintptr_t hidden) {
                const auto* ids = pointer<const std::int64_t>(token_ids);
                for (std::int32_t i = 0; i < n; ++i)
                    if (ids[i] < 0 || ids[i] >= self.vocab_size())
                        throw nb::index_error("token id outside the vocabulary");
                nb::gil_scoped_release release;
                self.embed(ids, n, pointer<float>(hidden));
            },
            "token_ids"_a, "n"_a, "hidden"_a, "hidden [n, hidden_size] of token_ids [n], int64.")
        .def(
            "pre_attention",
            [](DecoderLinear& self, std::int32_t layer, std::uintptr_t hidden, std::uintptr_t cos, std::uintptr_t sin,
               std::int32_t n, std::uintptr_t qkv) {
                self.pre_attention(layer, pointer<const float>(hidden), pointer<const float>(cos),
                                   pointer<const float>(sin), n, pointer<float>(qkv));
            },
            "layer"_a, "hidden"_a, "cos"_a, "sin"_a, "n"_a, "qkv"_a, nb::call_guard<nb::gil_scoped_release>(),
            "qkv [n, num_q_heads + 2 * num_kv_heads, head_dim] of hidden [n, hidden_size], rotated by cos and sin\n"
            "[n, rotary_dim / 2].")
        .def(
            "post_attention",
            [](DecoderLinear& self, std::int32_t layer, std::uintptr_t attended, std::int32_t n,
               std::uintptr_t hidden) {
                self.post_attention(layer, pointer<const float>(attended), n, pointer<float>(hidden));
            },
            "layer"_a, "attended"_a, "n"_a, "hidden"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Adds what the layer makes of attended [n, num_q_heads, head_dim] to hidden [n, hidden_size].")
        .def(
            "logits",
            [](DecoderLinear& self, std::uintptr_t hidden, std::int32_t n, std::uintptr_t logits) {
                self.logits(pointer<const float>(hidden), n, pointer<float>(logits));
            },
            "hidden"_a, "n"_a, "logits"_a, nb::call_guard<nb::gil_scoped_release>(), "logits [n, vocab_size].");
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
