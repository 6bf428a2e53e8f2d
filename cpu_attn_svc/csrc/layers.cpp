#include "layers.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace neoflex {

namespace {

void require(bool holds, const std::string& what) {
    if (!holds) throw PlaneError(what);
}

HeadCounts heads_of(const Shape& shape) { return {shape.num_q_heads, shape.num_kv_heads}; }

// Activations are fp32 here, whatever crosses the exchange slots.
KernelShape kernel_shape_of(const Shape& shape) {
    return make_kernel_shape(heads_of(shape), shape.head_dim, shape.block_tokens, shape.kv_dtype, DType::fp32,
                             shape.softmax_scale, shape.softcap);
}

std::byte* bytes_of(float* values) { return reinterpret_cast<std::byte*>(values); }

}  // namespace

LayerRunner::LayerRunner(Region& region, const Kernel& kernel, ThreadPool& threads, DecoderLinear& linear,
                         std::vector<std::int32_t> rotation_of_layer)
    : region_(region),
      kernel_(kernel),
      threads_(threads),
      linear_(linear),
      heads_(heads_of(region.shape())),
      shape_(kernel_shape_of(region.shape())),
      decode_(kernel, heads_, shape_, threads),
      prefill_(kernel, heads_, shape_, threads),
      rotation_of_layer_(std::move(rotation_of_layer)) {
    const Shape& shape = region.shape();
    const DecoderShape& model = linear.shape();
    require(model.hidden_size == shape.hidden_size && model.num_q_heads == shape.num_q_heads &&
                model.num_kv_heads == shape.num_kv_heads && model.head_dim == shape.head_dim,
            "the layers are not of the region's model");
    require(linear.num_layers() >= shape.num_cpu_layers &&
                rotation_of_layer_.size() >= static_cast<std::size_t>(shape.num_cpu_layers),
            std::to_string(linear.num_layers()) + " layers are loaded, the region wants " +
                std::to_string(shape.num_cpu_layers));
    for (std::int32_t layer = 0; layer < shape.num_cpu_layers; ++layer) {
        const std::int32_t window = shape.sliding_windows[layer];
        if (std::find(plan_windows_.begin(), plan_windows_.end(), window) == plan_windows_.end())
            plan_windows_.push_back(window);
    }
}

void LayerRunner::check(const LayerBatch& batch) const {
    Shape shape = region_.shape();
    const std::int64_t num_tokens = batch.num_tokens();
    require(batch.num_layers >= 1 && batch.num_layers <= shape.num_cpu_layers,
            std::to_string(batch.num_layers) + " CPU layers of " + std::to_string(shape.num_cpu_layers));
    require(num_tokens >= 1 && batch.first_row >= 0 && batch.first_row <= shape.max_tokens - num_tokens,
            std::to_string(num_tokens) + " tokens from row " + std::to_string(batch.first_row) + " on, of " +
                std::to_string(shape.max_tokens));
    for (std::int32_t kind : rotation_of_layer_)
        require(kind >= 0 && static_cast<std::size_t>(kind) < batch.rotations.size(), "a layer lacks its rotation");
    shape.max_sequences = std::numeric_limits<std::int32_t>::max();
    if (batch.decodes.num_sequences > 0) check_decodes(batch.decodes, shape, region_.num_lower_blocks());
    for (const LayerChunk& chunk : batch.chunks) {
        require(chunk.start >= 0 && chunk.num_tokens >= 1 &&
                    chunk.start <= std::numeric_limits<std::int32_t>::max() - chunk.num_tokens,
                "a chunk of " + std::to_string(chunk.num_tokens) + " tokens from " + std::to_string(chunk.start) + " on");
        const std::int32_t end = chunk.start + chunk.num_tokens;
        check_decodes({1, &end, chunk.block_table, batch.stride}, shape, region_.num_lower_blocks());
    }
}

void LayerRunner::begin(const LayerBatch& batch) {
    batch_ = &batch;
    const int num_threads = threads_.resize();
    plans_.clear();
    if (batch.decodes.num_sequences > 0)
        for (const std::int32_t window : plan_windows_)
            plans_.emplace_back(batch.decodes, heads_, shape_, window, num_threads);
    blocks_.clear();
    offsets_.clear();
    auto place = [&](std::int32_t position, const std::int32_t* table) {
        blocks_.push_back(table[position / shape_.block_tokens]);
        offsets_.push_back(position % shape_.block_tokens);
    };
    for (const LayerChunk& chunk : batch.chunks)
        for (std::int32_t i = 0; i < chunk.num_tokens; ++i) place(chunk.start + i, chunk.block_table);
    for (std::int32_t s = 0; s < batch.decodes.num_sequences; ++s)
        place(batch.decodes.context_tokens[s] - 1,
              batch.decodes.block_tables + static_cast<std::size_t>(s) * batch.decodes.stride);
    const std::size_t num_tokens = blocks_.size();
    qkv_.resize(std::max(qkv_.size(), num_tokens * linear_.shape().qkv_size()));
    attended_.resize(std::max(attended_.size(), num_tokens * linear_.shape().q_size()));
}

void LayerRunner::run_layer(std::int32_t layer) {
    const auto num_tokens = static_cast<std::int32_t>(blocks_.size());
    float* hidden = region_.hidden() + static_cast<std::size_t>(batch_->first_row) * region_.shape().hidden_size;
    const LayerRotation& rotation = batch_->rotations[rotation_of_layer_[layer]];
    linear_.pre_attention(layer, hidden, rotation.cos, rotation.sin, num_tokens, qkv_.data());
    const KvTokens kv{num_tokens, blocks_.data(), offsets_.data(), bytes_of(qkv_.data() + linear_.shape().q_size()),
                      static_cast<std::size_t>(linear_.shape().qkv_size())};
    write_kv(kernel_, heads_, shape_, threads_, kv, {region_.pool_layer(layer), region_.scales_layer(layer)});
    attend(layer);
    linear_.post_attention(layer, attended_.data(), num_tokens, hidden);
}

void LayerRunner::attend(std::int32_t layer) {
    const std::size_t q_stride = linear_.shape().qkv_size(), out_stride = linear_.shape().q_size();
    const std::int32_t window = region_.shape().sliding_windows[layer];
    std::byte* pool = region_.pool_layer(layer);
    float* scales = region_.scales_layer(layer);
    std::size_t row = 0;
    for (const LayerChunk& chunk : batch_->chunks) {
        prefill_.run({chunk.start, chunk.num_tokens, window, chunk.block_table},
                     {pool, scales, bytes_of(qkv_.data() + row * q_stride), q_stride,
                      bytes_of(attended_.data() + row * out_stride), out_stride});
        row += chunk.num_tokens;
    }
    if (plans_.empty()) return;
    const auto known = std::find(plan_windows_.begin(), plan_windows_.end(), window);
    decode_.run(plans_[known - plan_windows_.begin()],
                {pool, scales, bytes_of(qkv_.data() + row * q_stride), q_stride, nullptr, nullptr,
                 bytes_of(attended_.data() + row * out_stride), out_stride});
}

}  // namespace neoflex
