// Decode attention of a batch of sequences in one layer: splits it over threads and runs a kernel on the pieces.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernel.h"
#include "layout.h"
#include "thread_pool.h"

namespace neoflex {

// Sequences that decode one token each. Arrays are not owned.
struct DecodeBatch {
    std::int32_t num_sequences;
    const std::int32_t* context_tokens;  // [num_sequences], the new token included
    const std::int32_t* block_tables;    // [num_sequences, stride]
    std::int32_t stride;
};

struct HeadCounts {
    std::int32_t num_q_heads;
    std::int32_t num_kv_heads;
};

// One layer's tensors. k and v are null where the new token's are in the pool already.
struct LayerTensors {
    std::byte* pool;       // [num_blocks, 2, num_kv_heads, block_tokens * head_dim], kv dtype; see layout.h
    float* scales;         // [num_blocks, 2, num_kv_heads]; null unless the pool is in int8
    const std::byte* q;    // [num_sequences, num_q_heads, head_dim], exchange dtype
    std::size_t q_stride;  // elements from a sequence to the next
    const std::byte* k;    // [num_sequences, num_kv_heads, head_dim]
    const std::byte* v;    // like k
    std::byte* out;        // like q
    std::size_t out_stride;
};

// Throws PlaneError where a number is out of range.
void check_decodes(const DecodeBatch& batch, const Shape& shape, std::int32_t num_blocks);

// Scores count as they are.
inline constexpr float no_softcap = 0.0f;

KernelShape make_kernel_shape(const HeadCounts& heads, std::int32_t head_dim, std::int32_t block_tokens,
                              DType kv_dtype, DType exchange_dtype, float softmax_scale, float softcap);

// One KV head in all blocks of a layer. `scales` is the layer's, null unless the pool is in int8.
HeadKv head_kv(const KernelShape& shape, std::byte* pool, float* scales, std::size_t head,
               const std::int32_t* block_table);

// A kernel's vectors of keys may end past a block's last key, among its values. Where these are too few, the scalar
// kernel takes its place.
const Kernel& fitting_kernel(const Kernel& kernel, const KernelShape& shape);

// How a batch is cut into pieces of some adjacent KV heads of one sequence, or a span of its tokens. Same for all layers.
class DecodePlan {
  public:
    // `sliding_window`: tokens each query sees, itself included; 0: all.
    DecodePlan(const DecodeBatch& batch, const HeadCounts& heads, const KernelShape& shape,
               std::int32_t sliding_window, int num_threads);

  private:
    friend class DecodeAttention;

    struct Piece {
        std::int32_t sequence;
        std::int32_t first_head;  // KV heads
        std::int32_t num_heads;
        std::int32_t begin;  // tokens
        std::int32_t end;
        std::int32_t cut;         // index among the heads that are cut into spans; -1: this piece is all of them
        std::int32_t span;        // which of the spans
        std::int32_t num_spans;
        std::int32_t first_partial;
    };

    DecodeBatch batch_;
    std::vector<Piece> pieces_;
    std::int32_t num_cuts_ = 0;
    std::int32_t num_partials_ = 0;
    bool worth_helpers_ = false;
    // Per cut: spans still to come in this layer. The last one merges.
    std::unique_ptr<std::atomic<std::int32_t>[]> spans_left_;
    std::unique_ptr<float[]> partials_;
};

class DecodeAttention {
  public:
    DecodeAttention(const Kernel& kernel, const HeadCounts& heads, const KernelShape& shape, ThreadPool& threads);

    // Appends k and v and computes out. Allocates only where the pool has more threads than ever before.
    void run(DecodePlan& plan, const LayerTensors& layer);

  private:
    void make_room();
    void run_piece(DecodePlan& plan, const DecodePlan::Piece& piece, const LayerTensors& layer, float* scratch) const;

    const Kernel& kernel_;
    HeadCounts heads_;
    KernelShape shape_;
    ThreadPool& threads_;
    std::vector<std::unique_ptr<float[]>> scratch_;  // one per thread
};

}  // namespace neoflex
