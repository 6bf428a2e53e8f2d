// The model's first layers on the CPU: linear operations and attention, of prompts and of decodes, layer by layer.
#pragma once

#include <cstdint>
#include <vector>

#include "decode_attention.h"
#include "decoder_linear.h"
#include "kv_write.h"
#include "prefill_attention.h"
#include "region.h"

namespace neoflex {

// Tokens of a prompt that pass the layers; the KV of those before them is in the lower pool.
struct LayerChunk {
    std::int32_t start;
    std::int32_t num_tokens;
    const std::int32_t* block_table;  // in the lower pool; not owned
};

// What turns the heads of a batch's tokens in one kind of layer: [n, rotary_dim / 2] each. Not owned.
struct LayerRotation {
    const float* cos;
    const float* sin;
};

// Tokens that pass the first layers together: chunks of prompts, then decodes. Arrays are not owned.
struct LayerBatch {
    std::int32_t first_row;   // of the region's hidden states
    std::int32_t num_layers;  // that they pass
    std::vector<LayerChunk> chunks;
    DecodeBatch decodes;      // of none to all; tables in the lower pool
    std::int32_t stride;      // of all tables
    std::vector<LayerRotation> rotations;  // by kind of layer

    // Of numbers that nobody has checked, too: hence 64 bits.
    std::int64_t num_tokens() const {
        std::int64_t num = decodes.num_sequences;
        for (const LayerChunk& chunk : chunks) num += chunk.num_tokens;
        return num;
    }
};

// One batch at a time; buffers grow to the largest batch seen.
class LayerRunner {
  public:
    // `rotation_of_layer`: by CPU layer, which of a batch's rotations is its. All must outlive the runner.
    LayerRunner(Region& region, const Kernel& kernel, ThreadPool& threads, DecoderLinear& linear,
                std::vector<std::int32_t> rotation_of_layer);
    LayerRunner(const LayerRunner&) = delete;

    // Throws PlaneError where a number is out of range. Touches no memory of the region.
    void check(const LayerBatch& batch) const;
    // Takes a batch up, which must stay as it is until it has passed its layers.
    void begin(const LayerBatch& batch);
    // The next layer of that batch: its hidden states are overwritten, its K and V stored.
    void run_layer(std::int32_t layer);

  private:
    void attend(std::int32_t layer);

    Region& region_;
    const Kernel& kernel_;
    ThreadPool& threads_;
    DecoderLinear& linear_;
    HeadCounts heads_;
    KernelShape shape_;
    DecodeAttention decode_;
    PrefillAttention prefill_;
    std::vector<std::int32_t> rotation_of_layer_;
    const LayerBatch* batch_ = nullptr;
    std::vector<DecodePlan> plans_;            // of the batch's decodes, by window
    std::vector<std::int32_t> plan_windows_;   // the windows, each once
    std::vector<std::int32_t> blocks_, offsets_;  // of each token in the lower pool
    std::vector<float> qkv_;                   // [n, num_q_heads + 2 * num_kv_heads, head_dim]
    std::vector<float> attended_;              // [n, num_q_heads, head_dim]
};

}  // namespace neoflex
