// What lies where in the shared region: control words, exchange slots, hidden states, KV pools.
//
// The model's first num_cpu_layers layers, if any, are computed by the region's owner, whatever the tier of a sequence.
// Their KV lies in the lower pool, the other layers' in the tier's own: the executor's cache or the pool of host blocks.
// Each block of either tier has its counterpart in the lower pool: GPU block g is g there, host block h is
// num_gpu_blocks + h.
//
// A KV block, here and in gpu_svc's own cache, is block_tokens tokens of one layer: [2 (K, V), num_kv_heads, ...], then
//
//   V  [block_tokens, head_dim]        a token's values together: they are added up over tokens
//   K  [head_dim, block_tokens]        a dimension's keys together: a vector then holds one dimension of many tokens,
//                                      and scores need no sum across its lanes
//   K in bf16  [head_dim / 2, block_tokens, 2]   two dimensions of a token together, as products of bf16 take them; an
//                                      odd last dimension follows as [block_tokens]
//   K in int8  like K in bf16
//   V in int8  [block_tokens / 2, head_dim, 2]   a dimension of two tokens together, as products of integers take them;
//                                      an odd last token follows as [head_dim]
//
// A number in int8 counts times a scale, one in fp32 for each block, layer, K or V, and KV head. A block's scales hold
// as soon as its first token is written.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "doorbell.h"
#include "dtype.h"

namespace neoflex {

// Anything that is wrong with a region, in words for a person.
struct PlaneError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline constexpr std::uint64_t region_magic = 0x4e4f494745524e46;  // "FNREGION" in memory
// Raise it with every change of this file.
inline constexpr std::uint32_t layout_version = 4;
inline constexpr int num_slots = 2;
inline constexpr int max_head_dim = 256;
inline constexpr int max_layers = 256;
inline constexpr std::size_t page_bytes = 4096;
inline constexpr std::size_t line_bytes = 64;
inline constexpr std::uint64_t no_iteration = ~std::uint64_t{0};

inline DType parse_dtype(std::string_view name) {
    if (name == "fp32") return DType::fp32;
    if (name == "fp16") return DType::fp16;
    if (name == "bf16") return DType::bf16;
    if (name == "int8") return DType::int8;
    throw PlaneError("dtype \"" + std::string(name) + "\" is none of fp32, fp16, bf16, int8");
}

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// The attention that is computed over this region.
struct Shape {
    std::int32_t num_layers;
    std::int32_t num_q_heads;
    std::int32_t num_kv_heads;
    std::int32_t head_dim;
    std::int32_t block_tokens;
    DType kv_dtype;
    DType exchange_dtype;
    std::int32_t max_sequences;
    float softmax_scale;
    float softcap;  // c: a score s counts as c * tanh(s / c); 0: as it is
    std::array<std::int32_t, max_layers> sliding_windows;  // by layer: tokens each query sees, itself included; 0: all
    std::int32_t num_cpu_layers = 0;  // of num_layers the first, computed by the owner
    // Of use only with such layers:
    std::int32_t num_gpu_blocks = 0;
    std::int32_t hidden_size = 0;
    std::int32_t max_tokens = 0;  // most that pass these layers in one iteration

    bool operator==(const Shape&) const = default;

    // Query heads that share a KV head.
    std::int32_t group() const { return num_q_heads / num_kv_heads; }
    // K or V of one block, all KV heads.
    std::size_t half_block_elements() const {
        return static_cast<std::size_t>(num_kv_heads) * block_tokens * head_dim;
    }
    // K and V of one block in one layer, without scales.
    std::size_t layer_block_bytes() const { return 2 * half_block_elements() * dtype_bytes(kv_dtype); }
    // Scales of one block in one layer.
    std::size_t layer_block_scales() const { return kv_dtype == DType::int8 ? 2 * static_cast<std::size_t>(num_kv_heads) : 0; }
    // All that one block of the host tier takes, its counterpart in the lower pool included.
    std::size_t block_bytes() const { return num_layers * layer_bytes(); }
    // What a block of the GPU's tier takes in the lower pool.
    std::size_t lower_block_bytes() const { return num_cpu_layers * layer_bytes(); }

    void check() const {
        if (num_layers < 1 || num_kv_heads < 1 || num_q_heads < 1 || block_tokens < 1 || max_sequences < 1)
            throw PlaneError("shape: layers, heads, block_tokens and max_sequences must be at least 1");
        if (num_q_heads % num_kv_heads != 0) throw PlaneError("shape: num_kv_heads must divide num_q_heads");
        if (head_dim < 1 || head_dim > max_head_dim) throw PlaneError("shape: head_dim must be in [1, 256]");
        if (exchange_dtype == DType::int8) throw PlaneError("shape: q, k, v and out are not exchanged in int8");
        if (num_layers > max_layers) throw PlaneError("shape: at most 256 layers");
        if (!(softcap >= 0.0f)) throw PlaneError("shape: softcap must not be negative");
        for (std::int32_t window : sliding_windows)
            if (window < 0) throw PlaneError("shape: a sliding window must not be negative");
        if (num_cpu_layers < 0 || num_cpu_layers > num_layers || num_gpu_blocks < 0)
            throw PlaneError("shape: CPU layers must be among the layers, GPU blocks not negative");
        if (num_cpu_layers > 0 && (hidden_size < 1 || max_tokens < 1))
            throw PlaneError("shape: with CPU layers hidden_size and max_tokens must be at least 1");
    }

  private:
    std::size_t layer_bytes() const { return layer_block_bytes() + layer_block_scales() * sizeof(float); }
};

// Offsets in bytes. `slot_*` count from the start of a slot, the others from the start of the region.
struct Layout {
    std::size_t exchange_offset;
    std::size_t slot_bytes;
    std::size_t slot_q;    // [max_sequences, num_q_heads, head_dim], exchange dtype
    std::size_t slot_k;    // [max_sequences, num_kv_heads, head_dim]
    std::size_t slot_v;    // like k
    std::size_t slot_out;  // like q
    std::size_t hidden_offset;  // [max_tokens, hidden_size], fp32; none without CPU layers
    // [num_layers - num_cpu_layers, num_blocks, 2 (K, V), num_kv_heads, block_tokens * head_dim], kv dtype
    std::size_t pool_offset;
    std::size_t pool_bytes;
    // [num_layers - num_cpu_layers, num_blocks, 2 (K, V), num_kv_heads], fp32; none unless the pool is in int8
    std::size_t scales_offset;
    std::size_t scales_bytes;
    // Like pool and scales: [num_cpu_layers, num_gpu_blocks + num_blocks, ...]
    std::size_t lower_offset;
    std::size_t lower_bytes;
    std::size_t lower_scales_offset;
    std::size_t lower_scales_bytes;
    std::size_t region_bytes;
};

struct alignas(line_bytes) Control {
    std::atomic<std::uint64_t> magic;  // written last
    std::uint32_t version;
    std::int32_t num_blocks;
    std::uint64_t epoch;
    std::uint64_t region_bytes;
    Shape shape;
    alignas(line_bytes) std::atomic<std::uint32_t> attached;  // 1 once the executor has mapped the region
    std::atomic<std::uint32_t> closed;                        // 1 once either side has given the region up
    std::atomic<std::uint64_t> refused_iteration;             // the last that the worker refused
    Doorbell submitted[num_slots];                            // rung by the executor
    Doorbell completed[num_slots];                            // rung by the worker
    // Batches that pass the CPU layers, counted over all iterations: handed over, and done.
    Doorbell layers_submitted;
    Doorbell layers_completed;
};

static_assert(sizeof(Control) <= page_bytes);

inline Layout layout_of(const Shape& shape, std::int32_t num_blocks) {
    const std::size_t q_bytes = round_up(static_cast<std::size_t>(shape.max_sequences) * shape.num_q_heads *
                                             shape.head_dim * dtype_bytes(shape.exchange_dtype),
                                         line_bytes);
    const std::size_t kv_bytes = round_up(static_cast<std::size_t>(shape.max_sequences) * shape.num_kv_heads *
                                              shape.head_dim * dtype_bytes(shape.exchange_dtype),
                                          line_bytes);
    Layout layout{};
    layout.exchange_offset = page_bytes;
    layout.slot_q = 0;
    layout.slot_k = q_bytes;
    layout.slot_v = layout.slot_k + kv_bytes;
    layout.slot_out = layout.slot_v + kv_bytes;
    layout.slot_bytes = layout.slot_out + q_bytes;
    layout.hidden_offset = round_up(layout.exchange_offset + num_slots * layout.slot_bytes, page_bytes);
    const std::size_t hidden_bytes =
        shape.num_cpu_layers == 0 ? 0 : static_cast<std::size_t>(shape.max_tokens) * shape.hidden_size * sizeof(float);
    layout.pool_offset = round_up(layout.hidden_offset + hidden_bytes, page_bytes);
    const std::size_t upper = static_cast<std::size_t>(shape.num_layers - shape.num_cpu_layers) * num_blocks;
    layout.pool_bytes = upper * shape.layer_block_bytes();
    layout.scales_offset = round_up(layout.pool_offset + layout.pool_bytes, page_bytes);
    layout.scales_bytes = upper * shape.layer_block_scales() * sizeof(float);
    const std::size_t lower = static_cast<std::size_t>(shape.num_cpu_layers) * (shape.num_gpu_blocks + num_blocks);
    layout.lower_offset = round_up(layout.scales_offset + layout.scales_bytes, page_bytes);
    layout.lower_bytes = lower * shape.layer_block_bytes();
    layout.lower_scales_offset = round_up(layout.lower_offset + layout.lower_bytes, page_bytes);
    layout.lower_scales_bytes = lower * shape.layer_block_scales() * sizeof(float);
    layout.region_bytes = round_up(layout.lower_scales_offset + layout.lower_scales_bytes, page_bytes);
    return layout;
}

}  // namespace neoflex
