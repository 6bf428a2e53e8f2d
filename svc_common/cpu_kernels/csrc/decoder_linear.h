// The linear part of a decoder on the CPU: all that stands around attention in a layer, in one call each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
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

// What a layer consists of: all that the layout of its memory follows from.
struct LayerShape {
    bool norm_biases;  // LayerNorm, else RMSNorm
    bool qkv_bias;
    bool qk_norm;
    bool output_bias;
    bool post_norms;
    bool mlp_bias;
    std::int32_t inner_size;   // of the MLP, or of each expert
    std::int32_t num_experts;  // 0: one MLP
    std::int32_t experts_per_token;
    bool normalised;                 // see Experts
    std::int32_t shared_inner_size;  // of an expert that all tokens go through; 0: there is none
};

// With a bias LayerNorm, without one RMSNorm.
struct NormParameters {
    const float* weight;
    const float* bias;
};

// `up` [inner_size, hidden_size], or where the activation is gated [2 * inner_size, hidden_size] with the gates first.
struct MlpParameters {
    const float* up;
    const float* up_bias;
    const float* down;
    const float* down_bias;
};

// A layer's weights as models keep them. Matrices are [out, in]; what the layer lacks is null.
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
    std::vector<MlpParameters> mlps;  // one, or the experts'
    const float* router;              // [num_experts, hidden_size]
    MlpParameters shared;
    const float* shared_gate;  // [hidden_size]
};

// A part of a layer's memory, named as in Python's LayerWeights.
struct WeightPart {
    std::string name;
    std::size_t offset;
    std::int32_t rows;   // of a vector 1
    std::int32_t depth;  // elements of a row
    std::size_t panel_bytes;  // 0: a vector of fp32
    WeightType type;
    bool gated;
};

// Embedding and head of a decoder with int4 weights are int8: no layer after them evens out what they are off by.
constexpr WeightType vocabulary_type(WeightType type) { return type == WeightType::int4 ? WeightType::int8 : type; }

// Activations are fp32 and rows are dense. One caller at a time; buffers grow to the largest batch seen.
//
// It holds no weights: each layer, and the vocabulary, computes with memory of the caller's that it is bound to, in which
// all of it lies one after another. That may be memory of the process, a buffer that one layer follows the other in, or
// a file that several processes have mapped.
class DecoderLinear {
  public:
    DecoderLinear(const DecoderShape& shape, WeightType weight_type, ThreadPool& threads, const LinearKernel& kernel);

    // The next layer, without weights so far.
    void add_layer(const LayerShape& shape);
    void set_vocabulary(std::int32_t vocab_size, bool tied, bool norm_biases);

    // Bytes that a layer takes, a multiple of weight_alignment.
    std::size_t layer_bytes(std::int32_t layer) const;
    std::size_t vocabulary_bytes() const;
    // Where everything lies in it, for those who compute with another form of it.
    std::vector<WeightPart> layer_parts(std::int32_t layer) const;
    // Packs a layer into `memory`, zeroed, aligned and as large as layer_bytes.
    void pack_layer(std::int32_t layer, const LayerParameters& parameters, std::byte* memory) const;
    // `embedding` [vocab_size, hidden_size]; `head` like it, or null where the two are one.
    void pack_vocabulary(const float* embedding, const float* head, const NormParameters& final_norm,
                         std::byte* memory) const;
    // Computes with what was packed and now lies in `memory`, aligned, until it is bound elsewhere; null: with nothing.
    void bind_layer(std::int32_t layer, const std::byte* memory);
    void bind_vocabulary(const std::byte* memory);

    const DecoderShape& shape() const { return shape_; }
    std::int32_t vocab_size() const { return vocab_size_; }
    bool tied() const { return tied_; }
    bool norm_biases() const { return norm_biases_; }
    std::int32_t panel_columns() const { return kernel_.panel_columns; }
    const LayerShape& layer_shape(std::int32_t layer) const { return shapes_[layer]; }
    std::int32_t num_layers() const { return static_cast<std::int32_t>(layers_.size()); }

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
    // Vectors in bound memory, null where there are none.
    struct NormMemory {
        float* weight = nullptr;
        float* bias = nullptr;
    };
    struct Layer {
        NormMemory attention_norm, post_attention_norm, mlp_norm, post_mlp_norm;
        float* q_norm;
        float* k_norm;
        PackedMatrix qkv, output;
        std::optional<Mlp> mlp;
        std::optional<Experts> experts;
    };
    struct Vocabulary {
        NormMemory final_norm;
        PackedMatrix embedding;
        std::optional<PackedMatrix> head;  // none: tied
    };

    // Where everything lies in the arena's memory, in the one order that packing and binding share.
    Layer lay_out(const LayerShape& shape, WeightArena& arena) const;
    Vocabulary lay_out_vocabulary(WeightArena& arena) const;
    PackedMatrix matrix(WeightArena& arena, std::int32_t rows, std::int32_t depth, bool has_bias) const;
    PackedMatrix fp32_matrix(WeightArena& arena, std::int32_t rows) const;
    Mlp mlp(WeightArena& arena, std::int32_t inner_size, bool has_bias) const;
    NormMemory norm(WeightArena& arena, bool has_bias) const;
    void fill(const NormMemory& norm, const NormParameters& from) const;
    const Layer& bound_layer(std::int32_t layer) const;
    const Vocabulary& bound_vocabulary() const;

    void reserve(std::int32_t n);
    void normalise(const float* rows, std::int32_t n, const NormMemory& norm, const float* residual, float* out);
    void run_mlp(const Mlp& mlp, const float* rows, std::int32_t n, const float* residual, float* out);
    void run_experts(const Experts& experts, std::int32_t n, float* hidden);

    DecoderShape shape_;
    WeightType weight_type_;
    ProductResources resources_;
    const LinearKernel& kernel_;
    std::vector<LayerShape> shapes_;
    std::vector<std::optional<Layer>> layers_;  // none: bound to nothing
    std::optional<Vocabulary> vocabulary_;
    std::int32_t vocab_size_ = 0;
    bool tied_ = true;
    bool norm_biases_ = false;
    std::vector<float> normed_;  // [n, hidden_size]
    std::vector<float> inner_;   // [n, the MLP's inner size]
    std::vector<float> branch_;  // [n, hidden_size], what is still to be normalised or weighted
    std::vector<float> scores_;  // [n, num_experts], or [n] of a shared expert
    std::vector<float> gathered_;  // [n, hidden_size], the rows of one expert
    std::vector<std::vector<Route>> routes_;
};

}  // namespace neoflex
