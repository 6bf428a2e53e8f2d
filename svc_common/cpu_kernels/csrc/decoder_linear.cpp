#include "decoder_linear.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace neoflex {

namespace {

// Rows of a norm that one thread takes at a time, and elements below which waking another takes longer.
constexpr std::int32_t rows_per_task = 16;
constexpr std::int64_t min_elements_for_helpers = 32'768;

void grow(std::vector<float>& buffer, std::size_t size) {
    if (buffer.size() < size) buffer.resize(size);
}

void add_scaled(const float* row, float factor, std::int32_t width, float* to) {
    for (std::int32_t i = 0; i < width; ++i) to[i] += factor * row[i];
}

}  // namespace

DecoderLinear::DecoderLinear(const DecoderShape& shape, WeightType weight_type, ThreadPool& threads,
                             const LinearKernel& kernel)
    : shape_(shape), weight_type_(weight_type), resources_{threads, {}}, kernel_(kernel) {}

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
