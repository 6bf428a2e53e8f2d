// Python's view of the linear part of a decoder, and of the memory of its weights.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <type_traits>

#include "decoder_linear.h"
#include "linear_arrays.h"
#include "linear_module.h"

using namespace nanobind::literals;

namespace neoflex {
namespace {

template <typename T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

NormParameters norm_of(const std::optional<Vector>& weight, const std::optional<Vector>& bias, std::int32_t size) {
    return {vector_of(weight, size, "a norm does not fit"), vector_of(bias, size, "a norm's bias does not fit")};
}

// The up and down matrices of each of `count` MLPs.
std::vector<MlpParameters> mlps_of(const DecoderShape& shape, std::int32_t inner, std::size_t count,
                                   const std::vector<Matrix>& ups, const std::vector<Matrix>& downs) {
    const std::int32_t up_rows = inner * (is_gated(shape.activation) ? 2 : 1);
    require(ups.size() == count && downs.size() == count, "the layer has another number of MLPs");
    std::vector<MlpParameters> mlps;
    for (std::size_t i = 0; i < count; ++i)
        mlps.push_back({matrix_of(ups[i], up_rows, shape.hidden_size, "up does not fit"), nullptr,
                        matrix_of(downs[i], shape.hidden_size, inner, "down does not fit"), nullptr});
    return mlps;
}

using Bytes = nb::ndarray<const std::uint8_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<std::uint8_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

template <typename Array>
auto memory_of(const Array& memory, std::size_t num_bytes) {
    require(memory.shape(0) >= num_bytes, "the memory is too small");
    require(reinterpret_cast<std::uintptr_t>(memory.data()) % weight_alignment == 0, "the memory is not aligned");
    using Byte = std::conditional_t<std::is_same_v<Array, Bytes>, const std::byte, std::byte>;
    return reinterpret_cast<Byte*>(memory.data());
}

std::int32_t layer_in(const DecoderLinear& decoder, std::int32_t layer) {
    if (layer < 0 || layer >= decoder.num_layers()) throw nb::index_error("no such layer");
    return layer;
}

void pack_layer(const DecoderLinear& decoder, std::int32_t layer, const OutBytes& memory, const Vector& attention_norm,
                const std::optional<Vector>& attention_norm_bias, const Matrix& qkv,
                const std::optional<Vector>& qkv_bias, const std::optional<Vector>& q_norm,
                const std::optional<Vector>& k_norm, const Matrix& output, const std::optional<Vector>& output_bias,
                const std::optional<Vector>& post_attention_norm, const Vector& mlp_norm,
                const std::optional<Vector>& mlp_norm_bias, const std::optional<Vector>& post_mlp_norm,
                const std::vector<Matrix>& ups, const std::vector<Matrix>& downs, const std::optional<Vector>& up_bias,
                const std::optional<Vector>& down_bias, const std::optional<Matrix>& router,
                const std::optional<Matrix>& shared_up, const std::optional<Matrix>& shared_down,
                const std::optional<Vector>& shared_gate) {
    const DecoderShape& shape = decoder.shape();
    const LayerShape& has = decoder.layer_shape(layer_in(decoder, layer));
    const std::int32_t hidden = shape.hidden_size;
    const auto present = [](bool wanted, const auto& value, const char* what) { require(wanted == bool(value), what); };
    present(has.norm_biases, attention_norm_bias, "attention_norm_bias does not fit the layer");
    present(has.norm_biases, mlp_norm_bias, "mlp_norm_bias does not fit the layer");
    present(has.qkv_bias, qkv_bias, "qkv_bias does not fit the layer");
    present(has.qk_norm, q_norm, "q_norm does not fit the layer");
    present(has.qk_norm, k_norm, "k_norm does not fit the layer");
    present(has.output_bias, output_bias, "output_bias does not fit the layer");
    present(has.post_norms, post_attention_norm, "post_attention_norm does not fit the layer");
    present(has.post_norms, post_mlp_norm, "post_mlp_norm does not fit the layer");
    present(has.mlp_bias, up_bias, "up_bias does not fit the layer");
    present(has.mlp_bias, down_bias, "down_bias does not fit the layer");
    present(has.num_experts > 0, router, "router does not fit the layer");
    present(has.shared_inner_size > 0, shared_up, "shared_up does not fit the layer");
    present(has.shared_inner_size > 0, shared_down, "shared_down does not fit the layer");
    present(has.shared_inner_size > 0, shared_gate, "shared_gate does not fit the layer");
    LayerParameters from{
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
        mlps_of(shape, has.inner_size, std::max(1, has.num_experts), ups, downs),
        router ? matrix_of(*router, has.num_experts, hidden, "router does not fit") : nullptr,
        {},
        vector_of(shared_gate, hidden, "shared_gate does not fit"),
    };
    const std::int32_t up_rows = has.inner_size * (is_gated(shape.activation) ? 2 : 1);
    from.mlps.front().up_bias = vector_of(up_bias, up_rows, "up_bias does not fit");
    from.mlps.front().down_bias = vector_of(down_bias, hidden, "down_bias does not fit");
    if (shared_up) from.shared = mlps_of(shape, has.shared_inner_size, 1, {*shared_up}, {*shared_down}).front();
    std::byte* target = memory_of(memory, decoder.layer_bytes(layer));
    nb::gil_scoped_release release;
    decoder.pack_layer(layer, from, target);
}

void pack_vocabulary(const DecoderLinear& decoder, const OutBytes& memory, const Matrix& embedding,
                     const std::optional<Matrix>& head, const Vector& final_norm,
                     const std::optional<Vector>& final_norm_bias) {
    const std::int32_t hidden = decoder.shape().hidden_size;
    require(bool(head) != decoder.tied(), "head does not fit");
    require(bool(final_norm_bias) == decoder.norm_biases(), "final_norm_bias does not fit");
    const float* rows = matrix_of(embedding, decoder.vocab_size(), hidden, "embedding does not fit");
    const float* head_rows = head ? matrix_of(*head, decoder.vocab_size(), hidden, "head does not fit") : nullptr;
    const NormParameters norm = norm_of(final_norm, final_norm_bias, hidden);
    std::byte* target = memory_of(memory, decoder.vocabulary_bytes());
    nb::gil_scoped_release release;
    decoder.pack_vocabulary(rows, head_rows, norm, target);
}

void add_layer(DecoderLinear& decoder, bool norm_biases, bool qkv_bias, bool qk_norm, bool output_bias, bool post_norms,
               bool mlp_bias, std::int32_t inner_size, std::int32_t num_experts, std::int32_t experts_per_token,
               bool normalised, std::int32_t shared_inner_size) {
    require(inner_size > 0, "inner_size must be at least 1");
    require(num_experts == 0 || (experts_per_token >= 1 && experts_per_token <= num_experts),
            "experts_per_token does not fit the experts");
    require(num_experts == 0 || !mlp_bias, "experts have no biases");
    decoder.add_layer({norm_biases, qkv_bias, qk_norm, output_bias, post_norms, mlp_bias, inner_size, num_experts,
                       experts_per_token, normalised, shared_inner_size});
}

// Memory for weights, zeroed, in huge pages where the system allows them.
auto weight_memory(std::size_t num_bytes) {
    auto arena = std::make_unique<WeightArena>();
    std::byte* data = arena->allocate(num_bytes);
    nb::capsule owner(arena.release(), [](void* owned) noexcept { delete static_cast<WeightArena*>(owned); });
    return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {num_bytes}, owner);
}

}  // namespace

void bind_decoder(nb::module_& m) {
    nb::class_<WeightPart>(m, "WeightPart", "A vector or a matrix in the memory of a packed layer.")
        .def_ro("name", &WeightPart::name)
        .def_ro("offset", &WeightPart::offset, "In bytes.")
        .def_ro("rows", &WeightPart::rows, "Of a vector 1.")
        .def_ro("depth", &WeightPart::depth, "Elements of a row.")
        .def_ro("panel_bytes", &WeightPart::panel_bytes, "From a panel to the next; 0: a vector of fp32.")
        .def_prop_ro("dtype", [](const WeightPart& part) { return name_of(part.type); }, "fp32, fp16, bf16, int8 or int4.")
        .def_ro("gated", &WeightPart::gated,
                "Whether each panel has columns of the first half of the rows, then of the second.");
    nb::class_<DecoderLinear>(m, "DecoderLinear",
                              "The linear part of a decoder. Activations are fp32, in dense rows, and come as\n"
                              "addresses of memory that the caller has checked: this is called twice per layer.\n"
                              "It owns no weights: what it is bound to has to outlive the binding.")
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
        .def("add_layer", &add_layer, nb::kw_only(), "norm_biases"_a, "qkv_bias"_a, "qk_norm"_a, "output_bias"_a,
             "post_norms"_a, "mlp_bias"_a, "inner_size"_a, "num_experts"_a = 0, "experts_per_token"_a = 0,
             "normalised"_a = false, "shared_inner_size"_a = 0,
             "Says what the next layer consists of. Norms with biases are LayerNorm, others RMSNorm. inner_size is\n"
             "that of its MLP or of each of its experts, shared_inner_size of the one that all tokens go through.")
        .def("set_vocabulary", &DecoderLinear::set_vocabulary, "vocab_size"_a, "tied"_a, "norm_biases"_a,
             "Says what embedding, head and final norm are; tied: the head is the embedding.")
        .def(
            "layer_bytes",
            [](const DecoderLinear& self, std::int32_t layer) { return self.layer_bytes(layer_in(self, layer)); },
            "layer"_a, "Bytes of the layer once it is packed.")
        .def(
            "layer_parts",
            [](const DecoderLinear& self, std::int32_t layer) { return self.layer_parts(layer_in(self, layer)); },
            "layer"_a, "What lies where in a packed layer.")
        .def_prop_ro("vocabulary_bytes", &DecoderLinear::vocabulary_bytes,
                     "Bytes of embedding, head and final norm once they are packed.")
        .def_prop_ro("panel_columns", &DecoderLinear::panel_columns,
                     "Columns of a panel; what is packed serves all instruction sets that have as many.")
        .def("pack_layer", &pack_layer, "layer"_a, "memory"_a, nb::kw_only(), "attention_norm"_a,
             "attention_norm_bias"_a.none(), "qkv"_a, "qkv_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(),
             "output"_a, "output_bias"_a.none(), "post_attention_norm"_a.none(), "mlp_norm"_a,
             "mlp_norm_bias"_a.none(), "post_mlp_norm"_a.none(), "ups"_a, "downs"_a, "up_bias"_a.none(),
             "down_bias"_a.none(), "router"_a.none(), "shared_up"_a.none(), "shared_down"_a.none(),
             "shared_gate"_a.none(),
             "Packs a layer into zeroed memory of at least layer_bytes. Matrices are [out, in]; `ups` and `downs` are\n"
             "one, or those of all experts; where the activation is gated, each of `ups` has the gates first.")
        .def("pack_vocabulary", &pack_vocabulary, "memory"_a, nb::kw_only(), "embedding"_a, "head"_a.none(),
             "final_norm"_a, "final_norm_bias"_a.none(),
             "Packs embedding and head, each [vocab_size, hidden_size], into zeroed memory of vocabulary_bytes.")
        .def(
            "bind_layer",
            [](DecoderLinear& self, std::int32_t layer, const std::optional<Bytes>& memory) {
                const std::size_t num_bytes = self.layer_bytes(layer_in(self, layer));
                self.bind_layer(layer, memory ? memory_of(*memory, num_bytes) : nullptr);
            },
            "layer"_a, "memory"_a.none(), "Computes the layer from now on with what was packed into memory.")
        .def(
            "bind_vocabulary",
            [](DecoderLinear& self, const std::optional<Bytes>& memory) {
                self.bind_vocabulary(memory ? memory_of(*memory, self.vocabulary_bytes()) : nullptr);
            },
            "memory"_a.none())
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
    m.def("weight_memory", &weight_memory, "num_bytes"_a,
          "Zeroed bytes, aligned to a cache line, in huge pages where the system allows them.");
}

}  // namespace neoflex
