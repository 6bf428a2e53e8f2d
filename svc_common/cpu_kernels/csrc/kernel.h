// What a decode-attention kernel is given and what it does; one implementation per instruction set.
//
// Holds nothing that a compiler could emit as code, for the reason given in kernel_body.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace neoflex {

// Fixed for a region. Strides count elements.
struct KernelShape {
    std::int32_t group;         // query heads that share a KV head
    std::int32_t head_dim;
    std::int32_t block_tokens;
    DType kv_dtype;
    DType exchange_dtype;       // of q, k, v and out
    std::size_t block_stride;   // from a block to the next, in one layer
    std::size_t value_offset;   // from a block's keys to its values
    float softmax_scale;
};

// One KV head of one sequence. `pool` is that head in block 0 of the layer: [block_tokens, head_dim].
struct HeadKv {
    void* pool;
    const std::int32_t* block_table;
};

struct Kernel {
    const char* name;
    // Writes a token's k and v, each [head_dim], to `position` of the sequence.
    void (*append)(const KernelShape&, const HeadKv&, std::int32_t position, const void* k, const void* v);
    // Attends the group's queries [group, head_dim] to tokens [begin, end), at least one. Writes `out` like q or,
    // where that is null, a `partial` of partial_floats() for merge. `scratch` has scratch_floats(), all zero before
    // its first use.
    void (*attend)(const KernelShape&, const HeadKv&, std::int32_t begin, std::int32_t end, const void* q,
                   float* scratch, float* partial, void* out);
    // Joins the partials of one head's spans.
    void (*merge)(const KernelShape&, const float* partials, std::int32_t num_partials, void* out);
};

// Tokens a kernel looks at together at most, and the width its rows are padded to: the widest vector.
constexpr std::size_t max_lanes = 16;

constexpr std::size_t padded_dim(const KernelShape& shape) {
    return (static_cast<std::size_t>(shape.head_dim) + max_lanes - 1) / max_lanes * max_lanes;
}

// Per query head: accumulator [padded_dim], then maximum and sum, padded to a vector.
constexpr std::size_t partial_row_floats(const KernelShape& shape) { return padded_dim(shape) + max_lanes; }

constexpr std::size_t partial_floats(const KernelShape& shape) { return shape.group * partial_row_floats(shape); }

// Key and value tile [max_lanes, padded_dim] each; per query head: q and accumulator [padded_dim] each, weights and
// their sums [max_lanes] each, one maximum.
constexpr std::size_t scratch_floats(const KernelShape& shape) {
    return 2 * max_lanes * padded_dim(shape) + shape.group * (2 * padded_dim(shape) + 2 * max_lanes) +
           (shape.group + max_lanes - 1) / max_lanes * max_lanes;
}

extern const Kernel scalar_kernel;
#if defined(NEOFLEX_X86)
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;
#endif
#if defined(NEOFLEX_NEON)
extern const Kernel neon_kernel;
#endif

}  // namespace neoflex
