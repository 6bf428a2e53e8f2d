// Where the weights of a decoder lie in memory, and how they get there.
#include "decoder_linear.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace neoflex {

namespace {

void copy_floats(const float* from, std::int32_t count, float* to) {
    if (to != nullptr) std::copy_n(from, count, to);
}

// [count] in the arena's memory.
float* vector_in(WeightArena& arena, std::int32_t count) {
    return reinterpret_cast<float*>(arena.allocate(count * sizeof(float)));
}

void fill(Mlp& mlp, const MlpParameters& from) {
    mlp.up.fill(from.up, from.up_bias);
    mlp.down.fill(from.down, from.down_bias);
}

}  // namespace

PackedMatrix DecoderLinear::matrix(WeightArena& arena, std::int32_t rows, std::int32_t depth, bool has_bias) const {
    return PackedMatrix(kernel_, arena, rows, depth, weight_type_, Activation::none, has_bias);
}

PackedMatrix DecoderLinear::fp32_matrix(WeightArena& arena, std::int32_t rows) const {
    return PackedMatrix(kernel_, arena, rows, shape_.hidden_size, WeightType::fp32, Activation::none, false);
}

Mlp DecoderLinear::mlp(WeightArena& arena, std::int32_t inner_size, bool has_bias) const {
    const std::int32_t up_rows = inner_size * (is_gated(shape_.activation) ? 2 : 1);
    PackedMatrix up(kernel_, arena, up_rows, shape_.hidden_size, weight_type_, shape_.activation, has_bias);
    return {up, matrix(arena, shape_.hidden_size, inner_size, has_bias)};
}

DecoderLinear::NormMemory DecoderLinear::norm(WeightArena& arena, bool has_bias) const {
    float* weight = vector_in(arena, shape_.hidden_size);
    return {weight, has_bias ? vector_in(arena, shape_.hidden_size) : nullptr};
}

DecoderLinear::Layer DecoderLinear::lay_out(const LayerShape& shape, WeightArena& arena) const {
    const NormMemory attention_norm = norm(arena, shape.norm_biases);
    const NormMemory mlp_norm = norm(arena, shape.norm_biases);
    const NormMemory post_attention_norm = shape.post_norms ? norm(arena, false) : NormMemory{};
    const NormMemory post_mlp_norm = shape.post_norms ? norm(arena, false) : NormMemory{};
    float* q_norm = shape.qk_norm ? vector_in(arena, shape_.head_dim) : nullptr;
    float* k_norm = shape.qk_norm ? vector_in(arena, shape_.head_dim) : nullptr;
    const PackedMatrix qkv = matrix(arena, shape_.qkv_size(), shape_.hidden_size, shape.qkv_bias);
    const PackedMatrix output = matrix(arena, shape_.hidden_size, shape_.q_size(), shape.output_bias);
    Layer layer{attention_norm, post_attention_norm, mlp_norm, post_mlp_norm, q_norm,
                k_norm,         qkv,                 output,   std::nullopt,  std::nullopt};
    if (shape.num_experts == 0) {
        layer.mlp.emplace(mlp(arena, shape.inner_size, shape.mlp_bias));
        return layer;
    }
    layer.experts.emplace(Experts{
        fp32_matrix(arena, shape.num_experts), shape.experts_per_token, shape.normalised, {}, std::nullopt, std::nullopt});
    Experts& experts = *layer.experts;
    for (std::int32_t expert = 0; expert < shape.num_experts; ++expert)
        experts.mlps.push_back(mlp(arena, shape.inner_size, false));
    if (shape.shared_inner_size > 0) {
        experts.shared.emplace(mlp(arena, shape.shared_inner_size, false));
        experts.shared_gate.emplace(fp32_matrix(arena, 1));
    }
    return layer;
}

DecoderLinear::Vocabulary DecoderLinear::lay_out_vocabulary(WeightArena& arena) const {
    const NormMemory final_norm = norm(arena, norm_biases_);
    const auto matrix = [&] {
        return PackedMatrix(kernel_, arena, vocab_size_, shape_.hidden_size, vocabulary_type(weight_type_),
                            Activation::none, false);
    };
    Vocabulary vocabulary{final_norm, matrix(), std::nullopt};
    if (!tied_) vocabulary.head.emplace(matrix());
    return vocabulary;
}

void DecoderLinear::add_layer(const LayerShape& shape) {
    shapes_.push_back(shape);
    layers_.emplace_back();
}

void DecoderLinear::set_vocabulary(std::int32_t vocab_size, bool tied, bool norm_biases) {
    vocab_size_ = vocab_size;
    tied_ = tied;
    norm_biases_ = norm_biases;
}

std::size_t DecoderLinear::layer_bytes(std::int32_t layer) const {
    WeightArena counter(nullptr);
    lay_out(shapes_[layer], counter);
    return counter.num_counted();
}

std::vector<WeightPart> DecoderLinear::layer_parts(std::int32_t index) const {
    WeightArena own;  // Pages that nobody touches take no memory.
    const std::byte* base = own.allocate(layer_bytes(index));
    WeightArena arena(const_cast<std::byte*>(base));
    const Layer layer = lay_out(shapes_[index], arena);
    std::vector<WeightPart> parts;
    const auto add = [&](const std::string& name, const float* vector, std::int32_t size) {
        if (vector == nullptr) return;
        const auto offset = static_cast<std::size_t>(reinterpret_cast<const std::byte*>(vector) - base);
        parts.push_back({name, offset, 1, size, 0, WeightType::fp32, false});
    };
    const auto add_matrix = [&](const std::string& name, const PackedMatrix& matrix) {
        const auto offset = static_cast<std::size_t>(matrix.panels() - base);
        parts.push_back({name, offset, matrix.num_columns(), matrix.depth(), matrix.panel_bytes(), matrix.type(),
                         matrix.gated()});
        if (matrix.bias() == nullptr) return;
        // A column of the panels, so that its padding and the order of gates are those of the matrix.
        const auto bias_offset = static_cast<std::size_t>(reinterpret_cast<const std::byte*>(matrix.bias()) - base);
        parts.push_back({name + "_bias", bias_offset, matrix.num_columns(), 1,
                         kernel_.panel_columns * sizeof(float), WeightType::fp32, matrix.gated()});
    };
    const auto add_mlp = [&](const std::string& prefix, const Mlp& mlp) {
        add_matrix(prefix + "up", mlp.up);
        add_matrix(prefix + "down", mlp.down);
    };
    add("attention_norm", layer.attention_norm.weight, shape_.hidden_size);
    add("attention_norm_bias", layer.attention_norm.bias, shape_.hidden_size);
    add("mlp_norm", layer.mlp_norm.weight, shape_.hidden_size);
    add("mlp_norm_bias", layer.mlp_norm.bias, shape_.hidden_size);
    add("post_attention_norm", layer.post_attention_norm.weight, shape_.hidden_size);
    add("post_mlp_norm", layer.post_mlp_norm.weight, shape_.hidden_size);
    add("q_norm", layer.q_norm, shape_.head_dim);
    add("k_norm", layer.k_norm, shape_.head_dim);
    add_matrix("qkv", layer.qkv);
    add_matrix("output", layer.output);
    if (layer.mlp) add_mlp("", *layer.mlp);
    if (!layer.experts) return parts;
    const Experts& experts = *layer.experts;
    add_matrix("router", experts.router);
    for (std::size_t expert = 0; expert < experts.mlps.size(); ++expert)
        add_mlp("experts." + std::to_string(expert) + ".", experts.mlps[expert]);
    if (experts.shared) {
        add_mlp("shared.", *experts.shared);
        add_matrix("shared.gate", *experts.shared_gate);
    }
    return parts;
}

std::size_t DecoderLinear::vocabulary_bytes() const {
    WeightArena counter(nullptr);
    lay_out_vocabulary(counter);
    return counter.num_counted();
}

void DecoderLinear::fill(const NormMemory& norm, const NormParameters& from) const {
    copy_floats(from.weight, shape_.hidden_size, norm.weight);
    copy_floats(from.bias, shape_.hidden_size, norm.bias);
}

void DecoderLinear::pack_layer(std::int32_t index, const LayerParameters& from, std::byte* memory) const {
    WeightArena arena(memory);
    Layer layer = lay_out(shapes_[index], arena);
    fill(layer.attention_norm, from.attention_norm);
    fill(layer.post_attention_norm, from.post_attention_norm);
    fill(layer.mlp_norm, from.mlp_norm);
    fill(layer.post_mlp_norm, from.post_mlp_norm);
    copy_floats(from.q_norm, shape_.head_dim, layer.q_norm);
    copy_floats(from.k_norm, shape_.head_dim, layer.k_norm);
    layer.qkv.fill(from.qkv, from.qkv_bias);
    layer.output.fill(from.output, from.output_bias);
    if (layer.mlp) {
        neoflex::fill(*layer.mlp, from.mlps.front());
        return;
    }
    Experts& experts = *layer.experts;
    experts.router.fill(from.router, nullptr);
    for (std::size_t expert = 0; expert < experts.mlps.size(); ++expert)
        neoflex::fill(experts.mlps[expert], from.mlps[expert]);
    if (!experts.shared) return;
    neoflex::fill(*experts.shared, from.shared);
    experts.shared_gate->fill(from.shared_gate, nullptr);
}

void DecoderLinear::pack_vocabulary(const float* embedding, const float* head, const NormParameters& final_norm,
                                    std::byte* memory) const {
    WeightArena arena(memory);
    Vocabulary vocabulary = lay_out_vocabulary(arena);
    fill(vocabulary.final_norm, final_norm);
    vocabulary.embedding.fill(embedding, nullptr);
    if (vocabulary.head) vocabulary.head->fill(head, nullptr);
}

void DecoderLinear::bind_layer(std::int32_t index, const std::byte* memory) {
    layers_[index].reset();
    if (memory == nullptr) return;
    WeightArena arena(const_cast<std::byte*>(memory));  // Only `fill` writes.
    layers_[index].emplace(lay_out(shapes_[index], arena));
}

void DecoderLinear::bind_vocabulary(const std::byte* memory) {
    vocabulary_.reset();
    if (memory == nullptr) return;
    WeightArena arena(const_cast<std::byte*>(memory));
    vocabulary_.emplace(lay_out_vocabulary(arena));
}

const DecoderLinear::Layer& DecoderLinear::bound_layer(std::int32_t index) const {
    if (!layers_.at(index)) throw std::logic_error("layer " + std::to_string(index) + " has no weights here");
    return *layers_[index];
}

const DecoderLinear::Vocabulary& DecoderLinear::bound_vocabulary() const {
    if (!vocabulary_) throw std::logic_error("embedding and head have no weights here");
    return *vocabulary_;
}

}  // namespace neoflex
