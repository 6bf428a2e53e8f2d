// Writes new tokens' keys and values into the blocks of one layer, and copies blocks between caches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode_attention.h"
#include "kernel.h"
#include "thread_pool.h"

namespace neoflex {

// Arrays are not owned.
struct KvTokens {
    std::int32_t num_tokens;
    const std::int32_t* blocks;   // [num_tokens]
    const std::int32_t* offsets;  // [num_tokens], of each token in its block
    const std::byte* kv;          // [num_tokens, 2 (K, V), num_kv_heads, head_dim], exchange dtype
    std::size_t stride;           // elements from a token to the next
};

// A cache, or one layer of it.
struct Blocks {
    std::byte* pool;  // [num_blocks, 2, num_kv_heads, block_tokens * head_dim], kv dtype; see layout.h
    float* scales;    // [num_blocks, 2, num_kv_heads]; null unless the pool is in int8
};

// Throws PlaneError where a place is out of range, before anything is written. In int8 also where tokens of one block
// don't follow one another in order: they share a scale, and one thread has to see them all.
void check_places(const KvTokens& tokens, const KernelShape& shape, std::int32_t num_blocks);

void write_kv(const Kernel& kernel, const HeadCounts& heads, const KernelShape& shape, ThreadPool& threads,
              const KvTokens& tokens, const Blocks& layer);

// Blocks of all layers from one cache to another of the same heads, by way of fp32. Shapes exchange fp32.
struct BlockCopy {
    KernelShape from_shape;
    KernelShape to_shape;
    std::int32_t num_layers;
    std::int32_t from_num_blocks;  // of the whole cache: how far its layers are apart
    std::int32_t to_num_blocks;
    std::int32_t num_blocks;          // to copy
    const std::int32_t* from_blocks;  // [num_blocks]
    const std::int32_t* to_blocks;
    const std::int32_t* num_tokens;   // [num_blocks] that count, from the block's first on
};

// Throws PlaneError where a number is out of range, before anything is written.
void copy_blocks(const Kernel& kernel, const HeadCounts& heads, ThreadPool& threads, const BlockCopy& copy,
                 const Blocks& from, const Blocks& to);

}  // namespace neoflex
