// A layer's KV, read by what layout.h says and not by the kernels, and attention over it in double precision.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>

#include "check.h"
#include "decode_attention.h"
#include "kv_write.h"
#include "numbers.h"

namespace neoflex {
namespace {

struct Case {
    HeadCounts heads;
    std::int32_t head_dim;
    std::int32_t block_tokens;
    DType kv_dtype;
    DType exchange_dtype;
    std::int32_t sliding_window = 0;
    float softcap = 0.0f;

    KernelShape shape() const {
        return make_kernel_shape(heads, head_dim, block_tokens, kv_dtype, exchange_dtype,
                                 1.0f / std::sqrt(static_cast<float>(head_dim)), softcap);
    }

    std::string text(const char* kernel) const {
        return std::string(kernel) + ", " + std::to_string(heads.num_q_heads) + "/" +
               std::to_string(heads.num_kv_heads) + " heads of " + std::to_string(head_dim) + ", blocks of " +
               std::to_string(block_tokens) + " in " + name_of(kv_dtype) + ", q in " + name_of(exchange_dtype) +
               ", window " + std::to_string(sliding_window) + ", softcap " + std::to_string(softcap);
    }
};

// One sequence's blocks, anywhere in a pool that starts as NaN throughout, in int8 by its scales.
class Cache {
  public:
    Cache(const Case& what, std::int32_t num_tokens, std::mt19937& random)
        : case_(what),
          shape_(what.shape()),
          num_tokens_(num_tokens),
          table_((num_tokens - 1) / what.block_tokens + 1 + num_unused),
          pool_(table_.size() * shape_.block_stride * dtype_bytes(what.kv_dtype), std::byte{0xff}),
          scales_(what.kv_dtype == DType::int8 ? table_.size() * shape_.scale_stride : 0, std::nanf("")) {
        std::iota(table_.begin(), table_.end(), 0);
        std::shuffle(table_.begin(), table_.end(), random);
    }

    static constexpr std::int32_t num_unused = 2;

    std::int32_t num_blocks() const { return static_cast<std::int32_t>(table_.size()); }
    const std::vector<std::int32_t>& table() const { return table_; }  // what is unused comes last
    Blocks blocks() { return {pool_.data(), scales_.empty() ? nullptr : scales_.data()}; }

    // Tokens [num_tokens, 2 (K, V), num_kv_heads, head_dim], exchange dtype, `step` of them at a time.
    void write(const Kernel& kernel, ThreadPool& threads, const std::vector<std::byte>& kv, std::int32_t step) {
        const std::size_t stride = 2 * static_cast<std::size_t>(case_.heads.num_kv_heads) * case_.head_dim;
        for (std::int32_t first = 0; first < num_tokens_; first += step) {
            std::vector<std::int32_t> blocks, offsets;
            for (std::int32_t t = first; t < std::min(first + step, num_tokens_); ++t) {
                blocks.push_back(table_[t / case_.block_tokens]);
                offsets.push_back(t % case_.block_tokens);
            }
            const KvTokens tokens{static_cast<std::int32_t>(blocks.size()), blocks.data(), offsets.data(),
                                  kv.data() + first * stride * dtype_bytes(case_.exchange_dtype), stride};
            check_places(tokens, shape_, num_blocks());
            write_kv(kernel, case_.heads, shape_, threads, tokens, this->blocks());
        }
    }

    // `value`: 0 of a key, 1 of a value.
    double number(std::int32_t token, int value, std::int32_t head, std::int32_t d) const {
        const std::size_t block = table_[token / case_.block_tokens];
        return double{load(case_.kv_dtype, pool_.data(), place(block, token % case_.block_tokens, value, head, d))} *
               scale(block, value, head);
    }

    double scale(std::size_t block, int value, std::int32_t head) const {
        return scales_.empty() ? 1.0 : scales_[(2 * block + value) * case_.heads.num_kv_heads + head];
    }

    // Not for int8.
    void set(std::int32_t token, int value, std::int32_t head, std::int32_t d, float number) {
        store(case_.kv_dtype, pool_.data(),
              place(table_[token / case_.block_tokens], token % case_.block_tokens, value, head, d), number);
    }

    // No block beside the sequence's was written to.
    void check_others_untouched() const {
        const std::size_t block_bytes = shape_.block_stride * dtype_bytes(case_.kv_dtype);
        for (auto block = table_.end() - num_unused; block != table_.end(); ++block)
            for (std::size_t i = 0; i < block_bytes; ++i) CHECK(pool_[*block * block_bytes + i] == std::byte{0xff});
    }

    // Attention of a query [head_dim] of the last of `context` tokens.
    std::vector<double> attend(const std::byte* q, std::int32_t q_head, std::int32_t context) const {
        const std::int32_t head = q_head / shape_.group;
        const std::int32_t first = case_.sliding_window > 0 ? std::max(0, context - case_.sliding_window) : 0;
        std::vector<double> scores, out(case_.head_dim);
        for (std::int32_t t = first; t < context; ++t) {
            double score = 0;
            for (std::int32_t d = 0; d < case_.head_dim; ++d)
                score += double{load(case_.exchange_dtype, q, d)} * number(t, 0, head, d);
            score *= shape_.softmax_scale;
            scores.push_back(case_.softcap > 0 ? case_.softcap * std::tanh(score / case_.softcap) : score);
        }
        const double most = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double& score : scores) sum += score = std::exp(score - most);
        for (std::int32_t t = first; t < context; ++t)
            for (std::int32_t d = 0; d < case_.head_dim; ++d) out[d] += scores[t - first] / sum * number(t, 1, head, d);
        return out;
    }

  private:
    std::size_t place(std::size_t block, std::int32_t token, int value, std::int32_t head, std::int32_t d) const {
        const std::int32_t n = case_.block_tokens, dim = case_.head_dim;
        const std::size_t base =
            block * shape_.block_stride + value * shape_.value_offset + head * head_block_elements(shape_);
        const bool is_int8 = case_.kv_dtype == DType::int8;
        if (value == 1) {
            const bool paired = is_int8 && token < n / 2 * 2;
            return base + (paired ? (token / 2 * dim + d) * 2 + token % 2 : token * dim + d);
        }
        const bool paired = (is_int8 || case_.kv_dtype == DType::bf16) && d < dim / 2 * 2;
        return base + (paired ? (d / 2 * n + token) * 2 + d % 2 : d * n + token);
    }

    const Case case_;
    const KernelShape shape_;
    const std::int32_t num_tokens_;
    std::vector<std::int32_t> table_;
    std::vector<std::byte> pool_;
    std::vector<float> scales_;
};

}  // namespace
}  // namespace neoflex
