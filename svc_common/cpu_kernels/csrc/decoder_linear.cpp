#include "decoder_linear.h"

#include <algorithm>
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

}  // namespace

DecoderLinear::DecoderLinear(const DecoderShape& shape, DType weight_type, ThreadPool& threads,
                             const LinearKernel& kernel)
    : shape_(shape), weight_type_(weight_type), resources_{threads, {}}, kernel_(kernel) {}

void DecoderLinear::add_layer(const LayerParameters& layer) {
    const auto pack = [&](const float* weights, const float* bias, std::int32_t rows, std::int32_t depth, bool gated) {
        return PackedMatrix(kernel_, arena_, weights, bias, rows, depth, weight_type_, gated);
    };
    layers_.push_back(
        {copied(layer.attention_norm, shape_.hidden_size), copied(layer.q_norm, shape_.head_dim),
         copied(layer.k_norm, shape_.head_dim), copied(layer.mlp_norm, shape_.hidden_size),
         pack(layer.qkv, layer.qkv_bias, shape_.qkv_size(), shape_.hidden_size, false),
         pack(layer.output, layer.output_bias, shape_.hidden_size, shape_.q_size(), false),
         pack(layer.gate_up, layer.gate_up_bias, 2 * shape_.intermediate_size, shape_.hidden_size, true),
         pack(layer.down, layer.down_bias, shape_.hidden_size, shape_.intermediate_size, false)});
}

void DecoderLinear::set_vocabulary(const float* embedding, const float* head, const float* final_norm,
                                   std::int32_t vocab_size) {
    vocab_size_ = vocab_size;
    final_norm_ = copied(final_norm, shape_.hidden_size);
    const auto pack = [&](const float* weights) {
        return PackedMatrix(kernel_, arena_, weights, nullptr, vocab_size, shape_.hidden_size, weight_type_, false);
    };
    embedding_.emplace(pack(embedding));
    if (head != nullptr) head_.emplace(pack(head));
}

std::size_t DecoderLinear::num_bytes() const {
    std::size_t bytes = final_norm_.size() * sizeof(float);
    if (embedding_) bytes += embedding_->num_bytes();
    if (head_) bytes += head_->num_bytes();
    for (const Layer& layer : layers_) {
        for (const auto* values : {&layer.attention_norm, &layer.q_norm, &layer.k_norm, &layer.mlp_norm})
            bytes += values->size() * sizeof(float);
        for (const auto* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
            bytes += matrix->num_bytes();
    }
    return bytes;
}

void DecoderLinear::reserve(std::int32_t n) {
    resources_.threads.resize();
    const auto rows = static_cast<std::size_t>(n);
    if (normed_.size() < rows * shape_.hidden_size) normed_.resize(rows * shape_.hidden_size);
    if (inner_.size() < rows * shape_.intermediate_size) inner_.resize(rows * shape_.intermediate_size);
}

void DecoderLinear::normalise(const float* rows, std::int32_t n, const std::vector<float>& weight) {
    const std::int32_t width = shape_.hidden_size;
    const bool wake = std::int64_t{n} * width >= min_elements_for_helpers;
    resources_.threads.run(static_cast<std::uint32_t>((n + rows_per_task - 1) / rows_per_task), wake,
                 [&](std::uint32_t task, int) {
                     const auto first = static_cast<std::int32_t>(task) * rows_per_task;
                     const std::size_t offset = static_cast<std::size_t>(first) * width;
                     kernel_.rms_norm(rows + offset, std::min(rows_per_task, n - first), width, weight.data(),
                                      shape_.norm_eps, normed_.data() + offset);
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
    normalise(hidden, n, weights.attention_norm);
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
    Product(weights.output, attended, n, resources_).run(hidden, hidden);
    normalise(hidden, n, weights.mlp_norm);
    Product(weights.gate_up, normed_.data(), n, resources_).run(nullptr, inner_.data());
    Product(weights.down, inner_.data(), n, resources_).run(hidden, hidden);
}

void DecoderLinear::logits(const float* hidden, std::int32_t n, float* logits) {
    reserve(n);
    normalise(hidden, n, final_norm_);
    Product(head_ ? *head_ : *embedding_, normed_.data(), n, resources_).run(nullptr, logits);
}

}  // namespace neoflex
