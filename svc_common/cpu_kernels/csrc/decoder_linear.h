// The linear part of a decoder on the CPU: all that stands around attention in a layer, in one call each.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "experts.h"
#include "linear.h"

namespace neoflex {

struct DecoderShape {
    std::int32_t hidden_size;
    std::int32_t num_q_heads;
    std::int32_t num_kv_heads;
    std::int32_t head_dim;
    std::int32_t rotary_dim;  // 0: heads are not rotated
    float norm_eps;
    Activation activation;  // of all MLPs

    std::int32_t q_size() const { return num_q_heads * head_dim; }
    std::int32_t qkv_size() const { return (num_q_heads + 2 * num_kv_heads) * head_dim; }
};

// With a bias LayerNorm, without one RMSNorm.
struct NormParameters {
    const float* weight;
    const float* bias;
};

// A layer without its MLP. Matrices are [out, in]; what the model lacks is null.
struct LayerParameters {
    NormParameters attention_norm;
    const float* qkv;
    const float* qkv_bias;
    const float* q_norm;
    const float* k_norm;
    const float* output;
    const float* output_bias;
    NormParameters post_attention_norm;  // of what attention adds to hidden; RMSNorm
    NormParameters mlp_norm;
    NormParameters post_mlp_norm;  // of what the MLP adds; RMSNorm
};

// `up` [inner_size, hidden_size], or where the activation is gated [2 * inner_size, hidden_size] with the gates first.
struct MlpParameters {
    std::int32_t inner_size;
    const float* up;
    const float* up_bias;
    const float* down;
    const float* down_bias;
};

// Embedding and head of a decoder with int4 weights are int8: no layer after them evens out what they are off by.
constexpr WeightType vocabulary_type(WeightType type) { return type == WeightType::int4 ? WeightType::int8 : type; }

// Activations are fp32 and rows are dense. One caller at a time; buffers grow to the largest batch seen.
class DecoderLinear {
  public:
    DecoderLinear(const DecoderShape& shape, WeightType weight_type, ThreadPool& threads, const LinearKernel& kernel);

    // These copy everything. Layers come in order, after each its MLP: one, or a router and all its experts, after
    // which one may follow that is shared.
    void add_layer(const LayerParameters& layer);
    void set_mlp(const MlpParameters& mlp);
    // `router` [num_experts, hidden_size].
    void set_router(const float* router, std::int32_t num_experts, std::int32_t experts_per_token, bool normalised);
    void add_expert(const MlpParameters& mlp);
    // `gate` [hidden_size].
    void set_shared_expert(const MlpParameters& mlp, const float* gate);
    // `embedding` [vocab_size, hidden_size]; `head` like it, or null where the two are one.
    void set_vocabulary(const float* embedding, const float* head, const NormParameters& final_norm,
                        std::int32_t vocab_size);

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
    struct OwnedNorm {
        std::vector<float> weight, bias;
        bool absent() const { return weight.empty(); }
        std::size_t num_bytes() const { return (weight.size() + bias.size()) * sizeof(float); }
    };
    struct Layer {
        OwnedNorm attention_norm, post_attention_norm, mlp_norm, post_mlp_norm;
        std::vector<float> q_norm, k_norm;
        PackedMatrix qkv, output;
        std::optional<Mlp> mlp;
        std::optional<Experts> experts;
    };

    PackedMatrix pack(const float* weights, const float* bias, std::int32_t rows, std::int32_t depth);
    Mlp pack(const MlpParameters& mlp);
    OwnedNorm copied_norm(const NormParameters& norm) const;
    void reserve(std::int32_t n);
    void normalise(const float* rows, std::int32_t n, const OwnedNorm& norm, const float* residual, float* out);
    void run_mlp(const Mlp& mlp, const float* rows, std::int32_t n, const float* residual, float* out);
    void run_experts(const Experts& experts, std::int32_t n, float* hidden);

    DecoderShape shape_;
    WeightType weight_type_;
    ProductResources resources_;
    const LinearKernel& kernel_;
    WeightArena arena_;
    std::vector<Layer> layers_;
    std::optional<PackedMatrix> embedding_;
    std::optional<PackedMatrix> head_;  // none: tied
    OwnedNorm final_norm_;
    std::int32_t vocab_size_ = 0;
    std::vector<float> normed_;  // [n, hidden_size]
    std::vector<float> inner_;   // [n, the MLP's inner size]
    std::vector<float> branch_;  // [n, hidden_size], what is still to be normalised or weighted
    std::vector<float> scores_;  // [n, num_experts], or [n] of a shared expert
    std::vector<float> gathered_;  // [n, hidden_size], the rows of one expert
    std::vector<std::vector<Route>> routes_;
};

}  // namespace neoflex
