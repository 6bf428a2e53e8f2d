// A KV head's turn in a chunk of decode attention over keys and values in fp32, fp16 or bf16.
//
// Included by kernel_body.h; its rules hold here.
#pragma once

#include "kernel_decode_parts.h"

namespace neoflex {
namespace {

template <bool Dot, typename X>
void take_float_queries(const KernelShape& shape, const X* q, DecodeScratch& scratch) {
    const std::int32_t num_pairs = shape.head_dim / 2;
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        float* to = scratch.q + head * scratch.padded;
        for (std::int32_t h = 0; h < Heads; ++h) {
            const X* from = q + (head + h) * shape.head_dim;
            for (std::int32_t i = 0; i < 2 * num_pairs; ++i) {
                const std::int32_t place = (i / 2 * Heads + h) * 2 + i % 2;
                if constexpr (Dot) {
                    store_one(reinterpret_cast<BFloat*>(to) + place, to_float(from[i]));
                } else {
                    to[place] = to_float(from[i]);
                }
            }
            scratch.q_last[head + h] = shape.head_dim % 2 ? to_float(from[shape.head_dim - 1]) : 0.0f;
        }
    });
}

// Scores of `width` tokens from `offset` of a block on: one vector per head, to rows of `out`. Fetches `next` at the
// pace of reading.
template <typename S, typename KV, bool Dot, int Heads>
[[gnu::always_inline]] inline void score_tile(const KernelShape& shape, const float* q, const float* q_last,
                                              const KV* block, std::int32_t offset, const char* next, float* out) {
    typename S::Vec sums[Heads][2];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * Heads; ++i) sums[i / 2][i % 2] = S::zero();
    const std::int32_t num_pairs = shape.head_dim / 2;
    const std::size_t stride = shape.block_tokens;
    const KV* keys = block + offset * key_pack<KV>;
    constexpr std::size_t step_bytes = 2 * S::width * sizeof(KV);
    for (std::int32_t i = 0; i < num_pairs; ++i, keys += 2 * stride, next += step_bytes) {
        fetch<step_bytes>(next);
        if constexpr (Dot) {
            const auto x = S::load_words(keys);
            const auto* words = reinterpret_cast<const BFloat*>(q) + i * Heads * 2;
#pragma GCC unroll 4
            for (int h = 0; h < Heads; ++h) sums[h][0] = S::dot(sums[h][0], x, S::set_word(word_at(words + 2 * h)));
        } else {
            typename S::Vec x, y;
            load_key_pair<S>(keys, stride, x, y);
#pragma GCC unroll 4
            for (int h = 0; h < Heads; ++h) {
                sums[h][0] = S::fma(x, S::set(q[(i * Heads + h) * 2]), sums[h][0]);
                sums[h][1] = S::fma(y, S::set(q[(i * Heads + h) * 2 + 1]), sums[h][1]);
            }
        }
    }
    if (shape.head_dim % 2) {
        const auto x = S::load(block + 2 * num_pairs * stride + offset);
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) sums[h][0] = S::fma(x, S::set(q_last[h]), sums[h][0]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) S::store(out + h * decode_stride, S::add(sums[h][0], sums[h][1]));
}

template <typename S, typename KV, bool Dot, int Heads>
void score_chunk(const KernelShape& shape, const DecodePart<KV>* parts, std::int32_t num_parts, std::int32_t head,
                 DecodeScratch& scratch) {
    for (std::int32_t p = 0; p < num_parts; ++p) {
        const DecodePart<KV>& part = parts[p];
        // A tile may reach past its part: into the block's other rows, whose scores the next part or -infinity replace.
        for (std::int32_t t = 0; t < part.count; t += S::width) {
            const char* next = part.next_keys + t * shape.head_dim * sizeof(KV);
            score_tile<S, KV, Dot, Heads>(shape, scratch.q + head * scratch.padded, scratch.q_last + head, part.keys,
                                          part.offset + t, next,
                                          scratch.weights + head * decode_stride + part.first + t);
        }
    }
}

// Sums of values of `Heads` query heads in 2 * `Pairs` vectors of columns each, in registers.
template <typename S, int Heads, int Pairs>
struct Columns {
    typename S::Vec sums[Heads][2 * Pairs];

    [[gnu::always_inline]] void load(const float* acc, std::size_t padded) {
#pragma GCC unroll 16
        for (int i = 0; i < Heads * 2 * Pairs; ++i)
            sums[i / (2 * Pairs)][i % (2 * Pairs)] =
                S::load(acc + (i / (2 * Pairs)) * padded + (i % (2 * Pairs)) * S::width);
    }

    [[gnu::always_inline]] void store(float* acc, std::size_t padded) const {
#pragma GCC unroll 16
        for (int i = 0; i < Heads * 2 * Pairs; ++i)
            S::store(acc + (i / (2 * Pairs)) * padded + (i % (2 * Pairs)) * S::width,
                     sums[i / (2 * Pairs)][i % (2 * Pairs)]);
    }

    // `weights` of this token, a row per head. Of a row that ends within the columns, `count` are read.
    template <bool Whole, typename KV>
    [[gnu::always_inline]] void add(const KV* row, std::int32_t count, const float* weights) {
        typename S::Vec weight[Heads];
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) weight[h] = S::set(weights[h * decode_stride]);
#pragma GCC unroll 4
        for (int i = 0; i < Pairs; ++i) {
            typename S::Vec x, y;
            if constexpr (Whole) {
                load_columns<S>(row + i * 2 * S::width, x, y);
            } else {
                load_some_columns<S>(row, count, x, y);
            }
#pragma GCC unroll 4
            for (int h = 0; h < Heads; ++h) {
                sums[h][2 * i] = S::fma(x, weight[h], sums[h][2 * i]);
                sums[h][2 * i + 1] = S::fma(y, weight[h], sums[h][2 * i + 1]);
            }
        }
    }

    // Two tokens at once, with their weights in bf16.
    [[gnu::always_inline]] void add_two(const BFloat* row, std::int32_t row_stride, const BFloat* weights) {
#pragma GCC unroll 4
        for (int i = 0; i < Pairs; ++i) {
            typename S::Words even, odd;
            S::pair_up(S::load_words(row + i * 2 * S::width), S::load_words(row + row_stride + i * 2 * S::width), even,
                       odd);
#pragma GCC unroll 4
            for (int h = 0; h < Heads; ++h) {
                const auto pair = S::set_word(word_at(weights + h * pair_stride));
                sums[h][2 * i] = S::dot(sums[h][2 * i], even, pair);
                sums[h][2 * i + 1] = S::dot(sums[h][2 * i + 1], odd, pair);
            }
        }
    }
};

// acc[h, :] += weights[h, t] * values[t, :] over a chunk, from `column` on.
template <typename S, typename KV, bool Dot, int Heads, int Pairs, bool Whole>
[[gnu::always_inline]] inline void add_columns(const KernelShape& shape, const DecodePart<KV>* parts,
                                               std::int32_t num_parts, std::int32_t column, std::int32_t head,
                                               DecodeScratch& scratch) {
    constexpr std::size_t row_bytes = Pairs * 2 * S::width * sizeof(KV);
    float* acc = scratch.acc + head * scratch.padded + column;
    const std::int32_t stride = shape.head_dim;
    Columns<S, Heads, Pairs> columns;
    columns.load(acc, scratch.padded);
    for (std::int32_t p = 0; p < num_parts; ++p) {
        const DecodePart<KV>& part = parts[p];
        const KV* row = part.values + column;
        const std::size_t first_weight = head * decode_stride + part.first;
        [[maybe_unused]] const BFloat* pairs = reinterpret_cast<const BFloat*>(scratch.pairs);
        std::int32_t t = 0;
        if constexpr (Dot && Whole) {
            for (; t + 2 <= part.count; t += 2, row += 2 * stride) {
                fetch<row_bytes>(reinterpret_cast<const char*>(row) + part.next_values);
                fetch<row_bytes>(reinterpret_cast<const char*>(row + stride) + part.next_values);
                columns.add_two(row, stride, pairs + head * pair_stride + part.first + t);
            }
        }
        for (; t < part.count; ++t, row += stride) {
            fetch<row_bytes>(reinterpret_cast<const char*>(row) + part.next_values);
            columns.template add<Whole>(row, stride - column, scratch.weights + first_weight + t);
        }
    }
    columns.store(acc, scratch.padded);
}

template <typename S, typename KV, bool Dot, int Heads>
void add_float_values(const KernelShape& shape, const DecodePart<KV>* parts, std::int32_t num_parts, std::int32_t head,
                DecodeScratch& scratch) {
    constexpr int most = S::accumulators / (2 * Heads);
    std::int32_t column = 0;
    const auto add = [&]<int Pairs>(Constant<Pairs>) __attribute__((always_inline)) {
        for (; column + 2 * Pairs * S::width <= shape.head_dim; column += 2 * Pairs * S::width)
            add_columns<S, KV, Dot, Heads, Pairs, true>(shape, parts, num_parts, column, head, scratch);
    };
    if constexpr (most >= 4) add(Constant<4>{});
    if constexpr (most >= 2) add(Constant<2>{});
    add(Constant<1>{});
    if (column < shape.head_dim)
        add_columns<S, KV, Dot, Heads, 1, false>(shape, parts, num_parts, column, head, scratch);
}

// One KV head's turn in a chunk.
template <typename S, typename KV, bool Dot>
void attend_float_parts(const KernelShape& shape, const DecodePart<KV>* parts, std::int32_t num_parts, std::int32_t count,
                  DecodeScratch& scratch) {
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        score_chunk<S, KV, Dot, Heads>(shape, parts, num_parts, head, scratch);
    });
    for (std::int32_t g = 0; g < shape.group; ++g) {
        float* weights = scratch.weights + g * decode_stride;
        weigh<S>(shape, weights, 0, count, scratch.maxima[g], scratch.sums + g * max_lanes,
                 scratch.acc + g * scratch.padded);
        if constexpr (Dot) convert<S>(weights, reinterpret_cast<BFloat*>(scratch.pairs) + g * pair_stride, count, 1.0f);
    }
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        add_float_values<S, KV, Dot, Heads>(shape, parts, num_parts, head, scratch);
    });
}

}  // namespace
}  // namespace neoflex
