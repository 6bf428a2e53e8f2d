// The linear part of a decoder on the CPU: all that stands around attention in a layer, in one call each.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "linear.h"

namespace neoflex {

struct DecoderShape {
    std::int32_t hidden_size;
    std::int32_t intermediate_size;
    std::int32_t num_q_heads;
    std::int32_t num_kv_heads;
    std::int32_t head_dim;
    std::int32_t rotary_dim;
    float norm_eps;

    std::int32_t q_size() const { return num_q_heads * head_dim; }
    std::int32_t qkv_size() const { return (num_q_heads + 2 * num_kv_heads) * head_dim; }
};

// Matrices are [out, in]; what the model lacks is null.
struct LayerParameters {
    const float* attention_norm;
    const float* qkv;
    const float* qkv_bias;
    const float* q_norm;
    const float* k_norm;
    const float* output;
    const float* output_bias;
    const float* mlp_norm;
    const float* gate_up;
    const float* gate_up_bias;
    const float* down;
    const float* down_bias;
};

// Activations are fp32 and rows are dense. One caller at a time; buffers grow to the largest batch seen.
class DecoderLinear {
  public:
    DecoderLinear(const DecoderShape& shape, DType weight_type, ThreadPool& threads, const LinearKernel& kernel);

    // Copies everything. Layers come in order.
    void add_layer(const LayerParameters& layer);
    // `embedding` [vocab_size, hidden_size]; `head` like it, or null where the two are one.
    void set_vocabulary(const float* embedding, const float* head, const float* final_norm, std::int32_t vocab_size);

    const DecoderShape& shape() const { return shape_; }
    std::int32_t vocab_size() const { return vocab_size_; }
    std::int32_t num_layers() const { return static_cast<std::int32_t>(layers_.size()); }
    // Bytes of weights held.
    std::size_t num_bytes() const;

    // hidden [n, hidden_size]. Ids must lie in the vocabulary.
    void embed(const std::int64_t* token_ids, std::int32_t n, float* hidden);
    // qkv [n, num_q_heads + 2 * num_kv_heads, head_dim] of hidden [n, hidden_size], rotated by cos and sin
    // [n, rotary_dim / 2].
    void pre_attention(std::int32_t layer, const float* hidden, const float* cos, const float* sin, std::int32_t n,
                       float* qkv);
    // Adds what the layer makes of attended [n, num_q_heads, head_dim] to hidden [n, hidden_size].
    void post_attention(std::int32_t layer, const float* attended, std::int32_t n, float* hidden);
    // logits [n, vocab_size].
    void logits(const float* hidden, std::int32_t n, float* logits);

  private:
    struct Layer {
        std::vector<float> attention_norm, q_norm, k_norm, mlp_norm;
        PackedMatrix qkv, output, gate_up, down;
    };

    void reserve(std::int32_t n);
    void normalise(const float* rows, std::int32_t n, const std::vector<float>& weight);

    DecoderShape shape_;
    DType weight_type_;
    ProductResources resources_;
    const LinearKernel& kernel_;
    WeightArena arena_;
    std::vector<Layer> layers_;
    std::optional<PackedMatrix> embedding_;
    std::optional<PackedMatrix> head_;  // none: tied
    std::vector<float> final_norm_;
    std::int32_t vocab_size_ = 0;
    std::vector<float> normed_;  // [n, hidden_size]
    std::vector<float> inner_;   // [n, intermediate_size]
};

}  // namespace neoflex
