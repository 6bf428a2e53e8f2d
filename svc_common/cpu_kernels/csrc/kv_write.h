// Writes new tokens' keys and values into the blocks of one layer.
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

// Throws PlaneError where a place is out of range, before anything is written.
void check_places(const KvTokens& tokens, std::int32_t num_blocks, std::int32_t block_tokens);

void write_kv(const Kernel& kernel, const HeadCounts& heads, const KernelShape& shape, ThreadPool& threads,
              const KvTokens& tokens, std::byte* pool_layer);

}  // namespace neoflex
