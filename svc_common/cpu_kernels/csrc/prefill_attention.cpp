#include "prefill_attention.h"

#include <algorithm>

namespace neoflex {

namespace {

// Several tiles per thread even out their lengths: the last tokens see the most.
constexpr std::int32_t tiles_per_thread = 4;
// Fewer tokens share too little of what is converted for them.
constexpr std::int32_t min_tile_tokens = 8;

std::int32_t divide_up(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

}  // namespace

PrefillAttention::PrefillAttention(const Kernel& kernel, const HeadCounts& heads, const KernelShape& shape,
                                   ThreadPool& threads)
    : kernel_(fitting_kernel(kernel, shape)), heads_(heads), shape_(shape), threads_(threads) {}

void PrefillAttention::make_room() {
    while (scratch_.size() < static_cast<std::size_t>(threads_.num_running()))
        scratch_.push_back(std::make_unique<float[]>(prefill_scratch_floats(shape_)));
}

void PrefillAttention::run(const PrefillChunk& chunk, const PrefillTensors& layer) {
    make_room();
    const std::int32_t even =
        divide_up(chunk.num_tokens * heads_.num_kv_heads, threads_.num_running() * tiles_per_thread);
    const std::int32_t most = max_prefill_tokens(shape_);
    const std::int32_t tile_tokens = std::min(most, std::max(even, min_tile_tokens));
    const std::int32_t num_tiles = divide_up(chunk.num_tokens, tile_tokens);
    const std::size_t exchange_bytes = dtype_bytes(shape_.exchange_dtype);
    threads_.run(static_cast<std::uint32_t>(num_tiles * heads_.num_kv_heads), true, [&](std::uint32_t task, int thread) {
        const std::size_t kv_head = task % heads_.num_kv_heads;
        // The last tokens first: what is left at the end should be short.
        const std::int32_t index = num_tiles - 1 - static_cast<std::int32_t>(task) / heads_.num_kv_heads;
        const std::int32_t first = index * tile_tokens;
        const std::size_t heads_before = kv_head * shape_.group * shape_.head_dim;
        const auto token = static_cast<std::size_t>(first);
        const PrefillTile tile{chunk.start + first,
                               std::min(tile_tokens, chunk.num_tokens - first),
                               chunk.sliding_window,
                               layer.q + (token * layer.q_stride + heads_before) * exchange_bytes,
                               layer.q_stride,
                               layer.out + (token * layer.out_stride + heads_before) * exchange_bytes,
                               layer.out_stride};
        kernel_.prefill(shape_, head_kv(shape_, layer.pool, layer.scales, kv_head, chunk.block_table), tile,
                        scratch_[thread].get());
    });
}

}  // namespace neoflex
