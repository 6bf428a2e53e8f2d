// Causal attention of one prefill chunk in one layer, split over threads by KV head and tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "decode_attention.h"
#include "kernel.h"
#include "thread_pool.h"

namespace neoflex {

// Tokens [start, start + num_tokens) of a sequence whose KV up to there lies in blocks.
struct PrefillChunk {
    std::int32_t start;
    std::int32_t num_tokens;
    std::int32_t sliding_window;      // tokens each query sees, itself included; 0: all
    const std::int32_t* block_table;  // from the sequence's first token on; not owned
};

// One layer's tensors. Strides count elements from a token to the next.
struct PrefillTensors {
    std::byte* pool;       // [num_blocks, 2, num_kv_heads, block_tokens * head_dim], kv dtype; see layout.h
    float* scales;         // [num_blocks, 2, num_kv_heads]; null unless the pool is in int8
    const std::byte* q;    // [num_tokens, num_q_heads, head_dim], exchange dtype
    std::size_t q_stride;
    std::byte* out;        // like q
    std::size_t out_stride;
};

class PrefillAttention {
  public:
    PrefillAttention(const Kernel& kernel, const HeadCounts& heads, const KernelShape& shape, ThreadPool& threads);

    // Allocates only where the pool has more threads than ever before.
    void run(const PrefillChunk& chunk, const PrefillTensors& layer);

  private:
    void make_room();

    const Kernel& kernel_;
    HeadCounts heads_;
    KernelShape shape_;
    ThreadPool& threads_;
    std::vector<std::unique_ptr<float[]>> scratch_;  // one per thread
};

}  // namespace neoflex
