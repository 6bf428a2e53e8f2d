#include "decoder_linear.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace neoflex {

namespace {

// Rows of a norm that one thread takes at a time, and elements below which waking another takes longer.
constexpr std::int32_t rows_per_task = 16;
constexpr std::int64_t min_elements_for_helpers = 32'768;

void copy_floats(const float* from, std::int32_t count, float* to) {
    if (to != nullptr) std::copy_n(from, count, to);
}

// [count] in the arena's memory.
float* vector_in(WeightArena& arena, std::int32_t count) {
    return reinterpret_cast<float*>(arena.allocate(count * sizeof(float)));
}

void grow(std::vector<float>& buffer, std::size_t size) {
    if (buffer.size() < size) buffer.resize(size);
}

void add_scaled(const float* row, float factor, std::int32_t width, float* to) {
    for (std::int32_t i = 0; i < width; ++i) to[i] += factor * row[i];
}

void fill(Mlp& mlp, const MlpParameters& from) {
    mlp.up.fill(from.up, from.up_bias);
    mlp.down.fill(from.down, from.down_bias);
}

}  // namespace

DecoderLinear::DecoderLinear(const DecoderShape& shape, DType weight_type, ThreadPool& threads,
                             const LinearKernel& kernel)
    : shape_(shape), weight_type_(weight_type), resources_{threads, {}}, kernel_(kernel) {}

PackedMatrix DecoderLinear::matrix(WeightArena& arena, std::int32_t rows, std::int32_t depth, bool has_bias) const {
    return PackedMatrix(kernel_, arena, rows, depth, weight_type_, Activation::none, has_bias);
}

PackedMatrix DecoderLinear::fp32_matrix(WeightArena& arena, std::int32_t rows) const {
    return PackedMatrix(kernel_, arena, rows, shape_.hidden_size, DType::fp32, Activation::none, false);
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
    Vocabulary vocabulary{final_norm, matrix(arena, vocab_size_, shape_.hidden_size, false), std::nullopt};
    if (!tied_) vocabulary.head.emplace(matrix(arena, vocab_size_, shape_.hidden_size, false));
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
        parts.push_back({name, offset, 1, size, 0, DType::fp32, false});
    };
    const auto add_matrix = [&](const std::string& name, const PackedMatrix& matrix) {
        const auto offset = static_cast<std::size_t>(matrix.panels() - base);
        parts.push_back({name, offset, matrix.num_columns(), matrix.depth(), matrix.panel_bytes(), matrix.type(),
                         matrix.gated()});
        if (matrix.bias() == nullptr) return;
        // A column of the panels, so that its padding and the order of gates are those of the matrix.
        const auto bias_offset = static_cast<std::size_t>(reinterpret_cast<const std::byte*>(matrix.bias()) - base);
        parts.push_back({name + "_bias", bias_offset, matrix.num_columns(), 1,
                         kernel_.panel_columns * sizeof(float), DType::fp32, matrix.gated()});
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

void DecoderLinear::reserve(std::int32_t n) {
    resources_.threads.resize();
    grow(normed_, static_cast<std::size_t>(n) * shape_.hidden_size);
    grow(branch_, static_cast<std::size_t>(n) * shape_.hidden_size);
}

void DecoderLinear::normalise(const float* rows, std::int32_t n, const NormMemory& norm, const float* residual,
                              float* out) {
    const std::int32_t width = shape_.hidden_size;
    const bool wake = std::int64_t{n} * width >= min_elements_for_helpers;
    const Norm applied{norm.weight, norm.bias, shape_.norm_eps, norm.bias != nullptr};
    resources_.threads.run(static_cast<std::uint32_t>((n + rows_per_task - 1) / rows_per_task), wake,
                           [&](std::uint32_t task, int) {
                               const auto first = static_cast<std::int32_t>(task) * rows_per_task;
                               const std::size_t offset = static_cast<std::size_t>(first) * width;
                               kernel_.normalise(applied, rows + offset, std::min(rows_per_task, n - first), width,
                                                 residual == nullptr ? nullptr : residual + offset, out + offset);
                           });
}

void DecoderLinear::embed(const std::int64_t* token_ids, std::int32_t n, float* hidden) {
    const std::size_t width = shape_.hidden_size;
    const PackedMatrix& embedding = bound_vocabulary().embedding;
    resources_.threads.resize();
    // A row of a packed matrix is scattered over as many cache lines as it has elements.
    resources_.threads.run(static_cast<std::uint32_t>(n), n >= 4, [&](std::uint32_t i, int) {
        embedding.unpack_row(static_cast<std::int32_t>(token_ids[i]), hidden + i * width);
    });
}

void DecoderLinear::pre_attention(std::int32_t layer, const float* hidden, const float* cos, const float* sin,
                                  std::int32_t n, float* qkv) {
    reserve(n);
    const Layer& weights = bound_layer(layer);
    const HeadRows heads{shape_.num_q_heads, shape_.num_kv_heads, shape_.head_dim, shape_.rotary_dim,
                         weights.q_norm,     weights.k_norm,      shape_.norm_eps};
    const std::size_t qkv_size = shape_.qkv_size();
    const std::size_t half = shape_.rotary_dim / 2;
    normalise(hidden, n, weights.attention_norm, nullptr, normed_.data());
    // Pieces of whole heads, so that each is rotated where it was made.
    const std::int32_t columns = kernel_.panel_columns;
    Product(weights.qkv, normed_.data(), n, resources_)
        .run(nullptr, qkv, std::lcm(shape_.head_dim, columns) / columns,
             [&](std::int32_t first_row, std::int32_t end_row, std::int32_t first, std::int32_t end) {
                 for (std::int32_t row = first_row; row < end_row; ++row)
                     kernel_.rotate(heads, qkv + row * qkv_size, first / shape_.head_dim, end / shape_.head_dim,
                                    cos + row * half, sin + row * half);
             });
}

void DecoderLinear::post_attention(std::int32_t layer, const float* attended, std::int32_t n, float* hidden) {
    reserve(n);
    const Layer& weights = bound_layer(layer);
    if (weights.post_attention_norm.weight == nullptr) {
        Product(weights.output, attended, n, resources_).run(hidden, hidden);
    } else {
        Product(weights.output, attended, n, resources_).run(nullptr, branch_.data());
        normalise(branch_.data(), n, weights.post_attention_norm, hidden, hidden);
    }
    normalise(hidden, n, weights.mlp_norm, nullptr, normed_.data());
    if (weights.experts) {
        run_experts(*weights.experts, n, hidden);
    } else if (weights.post_mlp_norm.weight == nullptr) {
        run_mlp(*weights.mlp, normed_.data(), n, hidden, hidden);
    } else {
        run_mlp(*weights.mlp, normed_.data(), n, nullptr, branch_.data());
        normalise(branch_.data(), n, weights.post_mlp_norm, hidden, hidden);
    }
}

void DecoderLinear::run_mlp(const Mlp& mlp, const float* rows, std::int32_t n, const float* residual, float* out) {
    grow(inner_, static_cast<std::size_t>(n) * mlp.up.num_outputs());
    Product(mlp.up, rows, n, resources_).run(nullptr, inner_.data());
    Product(mlp.down, inner_.data(), n, resources_).run(residual, out);
}

// Expert after expert, so that a token's sum has one order whatever its neighbours. An expert's weights are read once.
void DecoderLinear::run_experts(const Experts& experts, std::int32_t n, float* hidden) {
    const std::size_t width = shape_.hidden_size;
    routes_.resize(experts.mlps.size());
    grow(scores_, n * experts.mlps.size());
    grow(gathered_, n * width);
    Product(experts.router, normed_.data(), n, resources_).run(nullptr, scores_.data());
    choose_experts(scores_.data(), n, experts, routes_);
    for (std::size_t expert = 0; expert < experts.mlps.size(); ++expert) {
        const std::vector<Route>& routes = routes_[expert];
        if (routes.empty()) continue;
        for (std::size_t i = 0; i < routes.size(); ++i)
            std::copy_n(normed_.data() + routes[i].row * width, width, gathered_.data() + i * width);
        run_mlp(experts.mlps[expert], gathered_.data(), static_cast<std::int32_t>(routes.size()), nullptr,
                branch_.data());
        for (std::size_t i = 0; i < routes.size(); ++i)
            add_scaled(branch_.data() + i * width, routes[i].weight, shape_.hidden_size, hidden + routes[i].row * width);
    }
    if (!experts.shared) return;
    run_mlp(*experts.shared, normed_.data(), n, nullptr, branch_.data());
    Product(*experts.shared_gate, normed_.data(), n, resources_).run(nullptr, scores_.data());
    for (std::int32_t row = 0; row < n; ++row)
        add_scaled(branch_.data() + row * width, 1.0f / (1.0f + std::exp(-scores_[row])), shape_.hidden_size,
                   hidden + row * width);
}

void DecoderLinear::logits(const float* hidden, std::int32_t n, float* logits) {
    reserve(n);
    const Vocabulary& vocabulary = bound_vocabulary();
    normalise(hidden, n, vocabulary.final_norm, nullptr, normed_.data());
    Product(vocabulary.head ? *vocabulary.head : vocabulary.embedding, normed_.data(), n, resources_)
        .run(nullptr, logits);
}

}  // namespace neoflex
