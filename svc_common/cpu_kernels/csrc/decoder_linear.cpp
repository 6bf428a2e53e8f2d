#include "decoder_linear.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace neoflex {

namespace {

// Rows of a norm that one thread takes at a time, and elements below which waking another takes longer.
constexpr std::int32_t rows_per_task = 16;
constexpr std::int64_t min_elements_for_helpers = 32'768;

std::vector<float> copied(const float* values, std::int32_t count) {
    return values == nullptr ? std::vector<float>() : std::vector<float>(values, values + count);
}

const float* data_or_null(const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }

void grow(std::vector<float>& buffer, std::size_t size) {
    if (buffer.size() < size) buffer.resize(size);
}

void add_scaled(const float* row, float factor, std::int32_t width, float* to) {
    for (std::int32_t i = 0; i < width; ++i) to[i] += factor * row[i];
}

std::size_t bytes_of(const Mlp& mlp) { return mlp.up.num_bytes() + mlp.down.num_bytes(); }

std::size_t bytes_of(const Experts& experts) {
    std::size_t bytes = experts.router.num_bytes();
    for (const Mlp& mlp : experts.mlps) bytes += bytes_of(mlp);
    if (experts.shared) bytes += bytes_of(*experts.shared) + experts.shared_gate->num_bytes();
    return bytes;
}

}  // namespace

DecoderLinear::DecoderLinear(const DecoderShape& shape, WeightType weight_type, ThreadPool& threads,
                             const LinearKernel& kernel)
    : shape_(shape), weight_type_(weight_type), resources_{threads, {}}, kernel_(kernel) {}

PackedMatrix DecoderLinear::pack(const float* weights, const float* bias, std::int32_t rows, std::int32_t depth) {
    return PackedMatrix(kernel_, arena_, weights, bias, rows, depth, weight_type_, Activation::none);
}

Mlp DecoderLinear::pack(const MlpParameters& mlp) {
    const std::int32_t up_rows = mlp.inner_size * (is_gated(shape_.activation) ? 2 : 1);
    return {PackedMatrix(kernel_, arena_, mlp.up, mlp.up_bias, up_rows, shape_.hidden_size, weight_type_,
                         shape_.activation),
            pack(mlp.down, mlp.down_bias, shape_.hidden_size, mlp.inner_size)};
}

DecoderLinear::OwnedNorm DecoderLinear::copied_norm(const NormParameters& norm) const {
    return {copied(norm.weight, shape_.hidden_size), copied(norm.bias, shape_.hidden_size)};
}

void DecoderLinear::add_layer(const LayerParameters& layer) {
    layers_.push_back({copied_norm(layer.attention_norm), copied_norm(layer.post_attention_norm),
                       copied_norm(layer.mlp_norm), copied_norm(layer.post_mlp_norm),
                       copied(layer.q_norm, shape_.head_dim), copied(layer.k_norm, shape_.head_dim),
                       pack(layer.qkv, layer.qkv_bias, shape_.qkv_size(), shape_.hidden_size),
                       pack(layer.output, layer.output_bias, shape_.hidden_size, shape_.q_size()),
                       std::nullopt, std::nullopt});
}

void DecoderLinear::set_mlp(const MlpParameters& mlp) { layers_.back().mlp.emplace(pack(mlp)); }

void DecoderLinear::set_router(const float* router, std::int32_t num_experts, std::int32_t experts_per_token,
                               bool normalised) {
    layers_.back().experts.emplace(Experts{PackedMatrix(kernel_, arena_, router, nullptr, num_experts,
                                                        shape_.hidden_size, WeightType::fp32, Activation::none),
                                           experts_per_token, normalised, {}, std::nullopt, std::nullopt});
}

void DecoderLinear::add_expert(const MlpParameters& mlp) { layers_.back().experts->mlps.push_back(pack(mlp)); }

void DecoderLinear::set_shared_expert(const MlpParameters& mlp, const float* gate) {
    Experts& experts = *layers_.back().experts;
    experts.shared.emplace(pack(mlp));
    experts.shared_gate.emplace(kernel_, arena_, gate, nullptr, 1, shape_.hidden_size, WeightType::fp32,
                                Activation::none);
}

void DecoderLinear::set_vocabulary(const float* embedding, const float* head, const NormParameters& final_norm,
                                   std::int32_t vocab_size) {
    vocab_size_ = vocab_size;
    final_norm_ = copied_norm(final_norm);
    const auto packed = [&](const float* weights) {
        return PackedMatrix(kernel_, arena_, weights, nullptr, vocab_size, shape_.hidden_size,
                            vocabulary_type(weight_type_), Activation::none);
    };
    embedding_.emplace(packed(embedding));
    if (head != nullptr) head_.emplace(packed(head));
}

std::size_t DecoderLinear::num_bytes() const {
    std::size_t bytes = final_norm_.num_bytes();
    if (embedding_) bytes += embedding_->num_bytes();
    if (head_) bytes += head_->num_bytes();
    for (const Layer& layer : layers_) {
        for (const auto* norm :
             {&layer.attention_norm, &layer.post_attention_norm, &layer.mlp_norm, &layer.post_mlp_norm})
            bytes += norm->num_bytes();
        bytes += (layer.q_norm.size() + layer.k_norm.size()) * sizeof(float);
        bytes += layer.qkv.num_bytes() + layer.output.num_bytes();
        if (layer.mlp) bytes += bytes_of(*layer.mlp);
        if (layer.experts) bytes += bytes_of(*layer.experts);
    }
    return bytes;
}

void DecoderLinear::reserve(std::int32_t n) {
    resources_.threads.resize();
    grow(normed_, static_cast<std::size_t>(n) * shape_.hidden_size);
    grow(branch_, static_cast<std::size_t>(n) * shape_.hidden_size);
}

void DecoderLinear::normalise(const float* rows, std::int32_t n, const OwnedNorm& norm, const float* residual,
                              float* out) {
    const std::int32_t width = shape_.hidden_size;
    const bool wake = std::int64_t{n} * width >= min_elements_for_helpers;
    const Norm applied{norm.weight.data(), data_or_null(norm.bias), shape_.norm_eps, !norm.bias.empty()};
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
    resources_.threads.resize();
    // A row of a packed matrix is scattered over as many cache lines as it has elements.
    resources_.threads.run(static_cast<std::uint32_t>(n), n >= 4, [&](std::uint32_t i, int) {
        embedding_->unpack_row(static_cast<std::int32_t>(token_ids[i]), hidden + i * width);
    });
}

void DecoderLinear::pre_attention(std::int32_t layer, const float* hidden, const float* cos, const float* sin,
                                  std::int32_t n, float* qkv) {
    reserve(n);
    const Layer& weights = layers_[layer];
    const HeadRows heads{shape_.num_q_heads,           shape_.num_kv_heads,
                         shape_.head_dim,              shape_.rotary_dim,
                         data_or_null(weights.q_norm), data_or_null(weights.k_norm),
                         shape_.norm_eps};
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
    const Layer& weights = layers_[layer];
    if (weights.post_attention_norm.absent()) {
        Product(weights.output, attended, n, resources_).run(hidden, hidden);
    } else {
        Product(weights.output, attended, n, resources_).run(nullptr, branch_.data());
        normalise(branch_.data(), n, weights.post_attention_norm, hidden, hidden);
    }
    normalise(hidden, n, weights.mlp_norm, nullptr, normed_.data());
    if (weights.experts) {
        run_experts(*weights.experts, n, hidden);
    } else if (weights.post_mlp_norm.absent()) {
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
    normalise(hidden, n, final_norm_, nullptr, normed_.data());
    Product(head_ ? *head_ : *embedding_, normed_.data(), n, resources_).run(nullptr, logits);
}

}  // namespace neoflex
