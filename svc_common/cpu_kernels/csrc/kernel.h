// What the attention kernels are given and what they do; one implementation per instruction set.
//
// Holds nothing that a compiler could emit as code, for the reason given in kernel_body.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace neoflex {

// Fixed for a region. Strides count elements. How K and V lie in a block: svc_common/tensor_plane/csrc/layout.h.
// Queries and attention never are in int8; keys and values may be.
struct KernelShape {
    std::int32_t group;         // query heads that share a KV head
    std::int32_t head_dim;
    std::int32_t block_tokens;
    DType kv_dtype;
    DType exchange_dtype;       // of q, k, v and out
    std::size_t block_stride;   // from a block to the next, in one layer
    std::size_t value_offset;   // from a block's keys to its values
    std::size_t scale_stride;   // from a block's scales to the next one's; half of it from its keys' to its values'
    float softmax_scale;
    float softcap;              // c: a score s counts as c * tanh(s / c); 0: as it is
};

// One KV head of one sequence. `pool` is that head's keys in block 0 of the layer, `scales` the scale of these; null
// unless they are in int8.
struct HeadKv {
    void* pool;
    float* scales;
    const std::int32_t* block_table;
};

// Consecutive tokens of one block. k and v: each [num_tokens, head_dim], `stride` elements from a token to the next.
struct BlockRows {
    std::int32_t block;
    std::int32_t offset;  // of the first of them in the block
    std::int32_t num_tokens;
    const void* k;
    const void* v;
    std::size_t stride;
};

// Consecutive tokens of one prompt that attend together.
struct PrefillTile {
    std::int32_t position;        // of the first of them in its sequence
    std::int32_t num_tokens;      // at most max_prefill_tokens()
    std::int32_t sliding_window;  // tokens each query sees, itself included; 0: all
    const void* q;                // [num_tokens, group, head_dim], exchange dtype
    std::size_t q_stride;         // elements from a token to the next
    void* out;                    // like q
    std::size_t out_stride;
};

struct Kernel {
    const char* name;
    // Writes k and v of the exchange type. In int8, a block in which the first token is written forgets all that it
    // held; tokens after that may shrink the earlier ones' numbers to make room for a larger one: see kernel_blocks.h.
    void (*write)(const KernelShape&, const HeadKv&, const BlockRows&);
    // Reads the first tokens of a block: k and v [num_tokens, head_dim].
    void (*read_tokens)(const KernelShape&, const HeadKv&, std::int32_t block, std::int32_t num_tokens, float* k, float* v);
    // Attends the queries [num_heads, group, head_dim] of adjacent KV heads, the first of which is given, to tokens
    // [begin, end), at least one. Writes `out` like q or, where that is null, a `partial` of partial_floats() for each
    // KV head. `scratch` has scratch_floats() for each.
    void (*attend)(const KernelShape&, const HeadKv&, std::int32_t num_heads, std::int32_t begin, std::int32_t end,
                   const void* q, float* scratch, float* partial, void* out);
    // Joins the partials [num_partials, num_heads] of such heads' spans.
    void (*merge)(const KernelShape&, const float* partials, std::int32_t num_partials, std::int32_t num_heads,
                  void* out);
    // Attends each token of the tile to itself and those before it. `scratch` has prefill_scratch_floats().
    void (*prefill)(const KernelShape&, const HeadKv&, const PrefillTile&, float* scratch);
    // Reads memory once, from front to end; the sum of its words keeps the loads alive. For measuring.
    std::uint64_t (*read)(const std::uint64_t* words, std::size_t num_words);
    // Independent fused multiply-adds in registers; returns how many. For measuring.
    double (*multiply_add)(std::int32_t num_rounds, float* sink);
};

// The widest vector.
constexpr std::size_t max_lanes = 16;
// Tokens that get their weights together: of a prompt's queries, for which they are converted first, and of decodes.
constexpr std::int32_t chunk_tokens = 64;
constexpr std::int32_t most_decode_tokens = 128;
// Room behind a chunk's rows: vectors of tokens may end past their last token.
constexpr std::size_t chunk_stride = chunk_tokens + max_lanes;
constexpr std::size_t decode_stride = most_decode_tokens + max_lanes;
// Room for a chunk's weights in 16 bits, two by two within each block: blocks of odd offsets and lengths waste places.
constexpr std::size_t pair_stride = 2 * most_decode_tokens + max_lanes;
// Query rows, tokens times heads of a group, that share keys and values once these are converted.
constexpr std::int32_t prefill_rows = 96;
// Query rows that are multiplied together, in registers.
constexpr std::int32_t rows_together = 6;

// Values are summed in two vectors at a time.
constexpr std::size_t padded_dim(const KernelShape& shape) {
    return (static_cast<std::size_t>(shape.head_dim) + 2 * max_lanes - 1) / (2 * max_lanes) * (2 * max_lanes);
}

constexpr std::size_t head_block_elements(const KernelShape& shape) {
    return static_cast<std::size_t>(shape.block_tokens) * shape.head_dim;
}

// Per query head: accumulator [padded_dim], then maximum and sum, padded to a vector.
constexpr std::size_t partial_row_floats(const KernelShape& shape) { return padded_dim(shape) + max_lanes; }

constexpr std::size_t partial_floats(const KernelShape& shape) { return shape.group * partial_row_floats(shape); }

// Per query head: q and accumulator [padded_dim] each, weights [decode_stride], these in 16 bits [pair_stride / 2], their
// sums [max_lanes], a maximum, the last of an odd number of dimensions, and q's scale. Once: weights by place
// [pair_stride].
constexpr std::size_t scratch_floats(const KernelShape& shape) {
    return shape.group * (2 * padded_dim(shape) + decode_stride + pair_stride / 2 + max_lanes + 3) + pair_stride;
}

constexpr std::int32_t max_prefill_tokens(const KernelShape& shape) {
    return shape.group < prefill_rows ? prefill_rows / shape.group : 1;
}

constexpr std::size_t max_prefill_rows(const KernelShape& shape) {
    return static_cast<std::size_t>((max_prefill_tokens(shape) * shape.group + rows_together - 1) / rows_together *
                                    rows_together);
}

// Keys [padded_dim, chunk_stride], values [chunk_tokens, padded_dim]; per row as for decodes, without bf16 weights.
constexpr std::size_t prefill_scratch_floats(const KernelShape& shape) {
    return padded_dim(shape) * (chunk_stride + chunk_tokens) +
           max_prefill_rows(shape) * (2 * padded_dim(shape) + chunk_stride + max_lanes + 1);
}

extern const Kernel scalar_kernel;
#if defined(NEOFLEX_X86)
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;
extern const Kernel avx512_bf16_kernel;
#endif
#if defined(NEOFLEX_NEON)
extern const Kernel neon_kernel;
#endif

}  // namespace neoflex
