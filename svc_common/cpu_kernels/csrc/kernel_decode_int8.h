// A KV head's turn in a chunk of decode attention over keys and values in int8.
//
// Included by kernel_body.h; its rules hold here. Products are of integers: queries, and weights times their block's
// scale, are rounded to 16 bits against the largest of their row. Processors multiply and add two such pairs in a lane at
// once, with sums of 32 bits that can't overflow: 256 * 32767 * 128 < 2^31. A score is off by at most
// max|q| / 65534 * sum|k| for it, an output by half of its chunk's largest weight times scale / 32767 for each value.
#pragma once

#include "kernel_blocks.h"
#include "kernel_decode_parts.h"

namespace neoflex {
namespace {

constexpr float largest_int16 = 32767.0f;

template <typename S, typename X>
void take_int8_queries(const KernelShape& shape, const X* q, DecodeScratch& scratch) {
    const std::int32_t num_pairs = shape.head_dim / 2;
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        auto* to = reinterpret_cast<std::int16_t*>(scratch.q + head * scratch.padded);
        for (std::int32_t h = 0; h < Heads; ++h) {
            const X* from = q + (head + h) * shape.head_dim;
            std::int16_t row[256];
            const float scale = scale_for(largest_magnitude(from, shape.head_dim), largest_int16);
            quantise_row<S>(from, row, shape.head_dim, inverse_of(scale));
            for (std::int32_t i = 0; i < 2 * num_pairs; ++i) to[(i / 2 * Heads + h) * 2 + i % 2] = row[i];
            scratch.q_scales[head + h] = scale;
            scratch.q_last[head + h] = shape.head_dim % 2 ? row[shape.head_dim - 1] : 0.0f;
        }
    });
}

// Scores of `width` tokens from `offset` of a block on: one vector per head, to rows of `out`. Fetches `next` at the
// pace of reading, a line for every two pairs of dimensions of the widest vectors.
template <typename S, int Heads>
[[gnu::always_inline]] inline void score_int8_tile(const KernelShape& shape, const std::int16_t* q, const float* q_last,
                                                   const float* q_scales, const std::int8_t* block,
                                                   std::int32_t offset, float key_scale, const char* next, float* out) {
    typename S::Ints sums[Heads][2];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * Heads; ++i) sums[i / 2][i % 2] = S::no_ints();
    const std::int32_t num_pairs = shape.head_dim / 2;
    const std::size_t stride = shape.block_tokens;
    const std::int8_t* keys = block + 2 * offset;
    constexpr std::size_t step_bytes = 4 * S::width;
    const auto add = [&](std::int32_t i, int chain) __attribute__((always_inline)) {
        const auto x = S::load_int16_pairs(keys + 2 * i * stride);
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h)
            sums[h][chain] = S::dot(sums[h][chain], x, S::set_int16_pair(word_at(q + (i * Heads + h) * 2)));
    };
    std::int32_t i = 0;
    for (; i + 2 <= num_pairs; i += 2, next += step_bytes) {
        fetch<step_bytes>(next);
        add(i, 0);
        add(i + 1, 1);
    }
    if (i < num_pairs) add(i, 0);
    if (shape.head_dim % 2) {
        const auto x = S::load_int16_firsts(block + 2 * num_pairs * stride + offset);
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) {
            const auto last = static_cast<std::uint16_t>(static_cast<std::int16_t>(q_last[h]));
            sums[h][0] = S::dot(sums[h][0], x, S::set_int16_pair(last));
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
        const auto sum = S::add(S::to_floats(sums[h][0]), S::to_floats(sums[h][1]));
        S::store(out + h * decode_stride, S::mul(sum, S::set(q_scales[h] * key_scale)));
    }
}

template <typename S, int Heads>
void score_int8_chunk(const KernelShape& shape, const DecodePart<std::int8_t>* parts, std::int32_t num_parts,
                      std::int32_t head, DecodeScratch& scratch) {
    const auto* q = reinterpret_cast<const std::int16_t*>(scratch.q + head * scratch.padded);
    for (std::int32_t p = 0; p < num_parts; ++p) {
        const DecodePart<std::int8_t>& part = parts[p];
        // As for floats, a tile may reach past its part.
        for (std::int32_t t = 0; t < part.count; t += S::width)
            score_int8_tile<S, Heads>(shape, q, scratch.q_last + head, scratch.q_scales + head, part.keys,
                                      part.offset + t, part.key_scale, part.next_keys + t * shape.head_dim,
                                      scratch.weights + head * decode_stride + part.first + t);
    }
}

// Pairs of a part's tokens, one that stands alone included.
inline std::int32_t pairs_of(const DecodePart<std::int8_t>& part) { return (part.offset % 2 + part.count + 1) / 2; }

// Weights of a chunk times their block's scale as integers, in pairs as the values lie: what has no weight, or no
// partner, counts as 0. Returns what the integers count; NaN where a scale is.
template <typename S>
float pair_weights(const DecodePart<std::int8_t>* parts, std::int32_t num_parts, const float* weights, float* places,
                   std::int16_t* pairs) {
    std::int32_t end = 0;
    float poison = 0.0f;
    auto largest = S::zero();
    for (std::int32_t p = 0; p < num_parts; ++p) {
        const DecodePart<std::int8_t>& part = parts[p];
        poison += part.value_scale * 0.0f;
        if (part.offset % 2) places[end++] = 0.0f;
        // The last vector may reach past the part; what follows it is written after it.
        for (std::int32_t t = 0; t < part.count; t += S::width)
            S::store(places + end + t, S::mul(S::load(weights + part.first + t), S::set(part.value_scale)));
        end += part.count;
        if (end % 2) places[end++] = 0.0f;
    }
    for (std::int32_t i = end; i % S::width != 0; ++i) places[i] = 0.0f;
    for (std::int32_t i = 0; i < end; i += S::width) largest = S::max(largest, S::load(places + i));
    const float scale = scale_for(to_bits(S::reduce_max(largest)), largest_int16);
    const auto inverse = S::set(inverse_of(scale));
    for (std::int32_t i = 0; i < end; i += S::width) S::store(pairs + i, S::mul(S::load(places + i), inverse));
    return scale + poison;
}

// acc[h, :] += weights[h, t] * values[t, :] over a chunk, from `column` on, in `Vectors` vectors of columns.
template <typename S, int Heads, int Vectors, bool Whole>
[[gnu::always_inline]] inline void add_int8_columns(const KernelShape& shape, const DecodePart<std::int8_t>* parts,
                                                    std::int32_t num_parts, std::int32_t column, std::int32_t head,
                                                    const float* scales, DecodeScratch& scratch) {
    constexpr std::size_t row_bytes = 2 * Vectors * S::width;
    typename S::Ints sums[Heads][Vectors];
#pragma GCC unroll 16
    for (int i = 0; i < Heads * Vectors; ++i) sums[i / Vectors][i % Vectors] = S::no_ints();
    const auto* pairs = reinterpret_cast<const std::int16_t*>(scratch.pairs) + head * pair_stride;
    const auto add = [&](int vector, typename S::Int16Pairs x) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h)
            sums[h][vector] = S::dot(sums[h][vector], x, S::set_int16_pair(word_at(pairs + h * pair_stride)));
    };
    for (std::int32_t p = 0; p < num_parts; ++p) {
        const DecodePart<std::int8_t>& part = parts[p];
        const std::int8_t* row = part.values + 2 * column;
        const std::int32_t end = pairs_of(part);
        const bool ends_alone = part.offset / 2 * 2 + 2 * end > shape.block_tokens;
        for (std::int32_t i = 0; i < end - ends_alone; ++i, row += 2 * shape.head_dim, pairs += 2) {
            fetch<row_bytes>(reinterpret_cast<const char*>(row) + part.next_values);
            if constexpr (Whole) {
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) add(v, S::load_int16_pairs(row + 2 * v * S::width));
            } else {
                std::int8_t whole[2 * S::width] = {};
                for (std::int32_t d = 0; d < 2 * (shape.head_dim - column); ++d) whole[d] = row[d];
                add(0, S::load_int16_pairs(whole));
            }
        }
        if (!ends_alone) continue;
        row -= column;
        if constexpr (Whole) {
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) add(v, S::load_int16_firsts(row + v * S::width));
        } else {
            std::int8_t whole[2 * S::width] = {};
            for (std::int32_t d = 0; d < shape.head_dim - column; ++d) whole[d] = row[d];
            add(0, S::load_int16_firsts(whole));
        }
        pairs += 2;
    }
#pragma GCC unroll 16
    for (int i = 0; i < Heads * Vectors; ++i) {
        float* acc = scratch.acc + (head + i / Vectors) * scratch.padded + column + i % Vectors * S::width;
        const auto sum = S::to_floats(sums[i / Vectors][i % Vectors]);
        S::store(acc, S::fma(sum, S::set(scales[i / Vectors]), S::load(acc)));
    }
}

template <typename S, int Heads>
void add_int8_values(const KernelShape& shape, const DecodePart<std::int8_t>* parts, std::int32_t num_parts,
                     std::int32_t head, DecodeScratch& scratch) {
    float scales[Heads];
    for (int h = 0; h < Heads; ++h)
        scales[h] = pair_weights<S>(parts, num_parts, scratch.weights + (head + h) * decode_stride, scratch.places,
                                    reinterpret_cast<std::int16_t*>(scratch.pairs) + (head + h) * pair_stride);
    constexpr int most = S::accumulators / Heads;
    std::int32_t column = 0;
    const auto add = [&]<int Vectors>(Constant<Vectors>) __attribute__((always_inline)) {
        for (; column + Vectors * S::width <= shape.head_dim; column += Vectors * S::width)
            add_int8_columns<S, Heads, Vectors, true>(shape, parts, num_parts, column, head, scales, scratch);
    };
    if constexpr (most >= 8) add(Constant<8>{});
    if constexpr (most >= 4) add(Constant<4>{});
    add(Constant<2>{});
    add(Constant<1>{});
    if (column < shape.head_dim)
        add_int8_columns<S, Heads, 1, false>(shape, parts, num_parts, column, head, scales, scratch);
}

// One KV head's turn in a chunk.
template <typename S>
void attend_int8_parts(const KernelShape& shape, const DecodePart<std::int8_t>* parts, std::int32_t num_parts,
                       std::int32_t count, DecodeScratch& scratch) {
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        score_int8_chunk<S, Heads>(shape, parts, num_parts, head, scratch);
    });
    for (std::int32_t g = 0; g < shape.group; ++g)
        weigh<S>(shape, scratch.weights + g * decode_stride, 0, count, scratch.maxima[g], scratch.sums + g * max_lanes,
                 scratch.acc + g * scratch.padded);
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        add_int8_values<S, Heads>(shape, parts, num_parts, head, scratch);
    });
}

}  // namespace
}  // namespace neoflex
