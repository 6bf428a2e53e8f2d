// Decode attention of one KV head's queries over a span of its tokens: the one body behind every kernel.
//
// Included by one translation unit per instruction set, each with its own compiler flags. All of it is in an unnamed
// namespace and calls no library code: an inline function shared between those units could be linked in the version
// for the wrong processor.
//
// Keys and values are read once. Tokens come in tiles of as many as a vector has lanes, so the scores of a tile are
// one vector per query head:
//
//   scores[lane] = q . key[lane]           softmax weights, rescaled as the maximum grows        acc += weights . values
//
// Softmax is taken to base 2; the change of base is in the queries.
#pragma once

#include "half.h"
#include "kernel.h"
#include "kernel_rows.h"

namespace neoflex {
namespace {

constexpr float log2_e = 1.44269504088896341f;

// 2^x for x <= 0; 0 below 2^-126.
template <typename S>
typename S::Vec exp2(typename S::Vec x) {
    // In this order NaN stays NaN.
    x = S::max(S::set(-127.0f), x);
    const auto whole = S::round(x);
    const auto f = S::sub(x, whole);
    // Series of e^(f ln 2), |f| <= 1/2: the rest is below 2^-26.
    auto y = S::set(1.5252734e-5f);
    y = S::fma(y, f, S::set(1.5403530e-4f));
    y = S::fma(y, f, S::set(1.3333558e-3f));
    y = S::fma(y, f, S::set(9.6181291e-3f));
    y = S::fma(y, f, S::set(5.5504109e-2f));
    y = S::fma(y, f, S::set(2.4022651e-1f));
    y = S::fma(y, f, S::set(6.9314718e-1f));
    y = S::fma(y, f, S::set(1.0f));
    return S::times_power_of_two(y, whole);
}

template <typename S>
float exp2_of(float x) {
    return S::reduce_max(exp2<S>(S::set(x)));
}

template <typename S, typename Width>
[[gnu::always_inline]] inline typename S::Vec scores(const float* q, const float* keys, Width padded) {
    typename S::Vec sums[S::width];
#pragma GCC unroll 16
    for (int t = 0; t < S::width; ++t) sums[t] = S::zero();
    for (std::size_t d = 0; d < padded; d += S::width) {
        const auto x = S::load(q + d);
#pragma GCC unroll 16
        for (int t = 0; t < S::width; ++t) sums[t] = S::fma(x, S::load(keys + t * padded + d), sums[t]);
    }
    return S::sum_rows(sums);
}

// acc[h, :] += weights[h, t] * values[t, :] for `Heads` query heads and `Vectors` vectors of each row.
template <typename S, int Heads, int Vectors, typename Width>
[[gnu::always_inline]] inline void add_columns(const float* weights, const float* values, std::int32_t num_tokens,
                                               float* acc, Width padded) {
    typename S::Vec sums[Heads][Vectors];
#pragma GCC unroll 8
    for (int i = 0; i < Heads * Vectors; ++i)
        sums[i / Vectors][i % Vectors] = S::load(acc + (i / Vectors) * padded + (i % Vectors) * S::width);
    for (std::int32_t t = 0; t < num_tokens; ++t) {
        typename S::Vec weight[Heads];
#pragma GCC unroll 2
        for (int h = 0; h < Heads; ++h) weight[h] = S::set(weights[h * max_lanes + t]);
#pragma GCC unroll 4
        for (int i = 0; i < Vectors; ++i) {
            const auto x = S::load(values + t * padded + i * S::width);
#pragma GCC unroll 2
            for (int h = 0; h < Heads; ++h) sums[h][i] = S::fma(x, weight[h], sums[h][i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < Heads * Vectors; ++i)
        S::store(acc + (i / Vectors) * padded + (i % Vectors) * S::width, sums[i / Vectors][i % Vectors]);
}

template <typename S, int Heads, typename Width>
[[gnu::always_inline]] inline void add_values(const float* weights, const float* values, std::int32_t num_tokens,
                                              float* acc, Width padded) {
    std::size_t d = 0;
    for (; d + 4 * S::width <= padded; d += 4 * S::width)
        add_columns<S, Heads, 4>(weights, values + d, num_tokens, acc + d, padded);
    for (; d < padded; d += S::width) add_columns<S, Heads, 1>(weights, values + d, num_tokens, acc + d, padded);
}

// The parts of `scratch`; see scratch_floats.
struct Scratch {
    Scratch(const KernelShape& shape, float* memory) {
        const std::size_t padded = padded_dim(shape);
        const std::size_t group = shape.group;
        key_tile = memory;
        value_tile = key_tile + max_lanes * padded;
        q = value_tile + max_lanes * padded;
        acc = q + group * padded;
        weights = acc + group * padded;
        sums = weights + group * max_lanes;
        maxima = sums + group * max_lanes;
    }

    float* key_tile;    // [max_lanes, padded]
    float* value_tile;  // [max_lanes, padded]
    float* q;           // [group, padded], times scale and log2(e)
    float* acc;         // [group, padded]
    float* weights;     // [group, max_lanes] of the current tile
    float* sums;        // [group, max_lanes] of the weights so far, by lane
    float* maxima;      // [group] of the scores so far
};

template <typename S, typename X>
void start(const KernelShape& shape, const X* q, Scratch& scratch) {
    const std::size_t padded = padded_dim(shape);
    for (std::int32_t g = 0; g < shape.group; ++g) {
        convert<S>(q + g * shape.head_dim, scratch.q + g * padded, shape.head_dim, shape.softmax_scale * log2_e);
        for (std::size_t d = 0; d < padded; d += S::width) S::store(scratch.acc + g * padded + d, S::zero());
        S::store(scratch.sums + g * max_lanes, S::zero());
        scratch.maxima[g] = -__builtin_inff();
    }
}

// Turns a tile's scores of query head g into weights, against the maximum so far.
template <typename S, typename Width>
[[gnu::always_inline]] inline void weigh(typename S::Vec tile_scores, std::int32_t g, Scratch& scratch, Width padded) {
    float* sums = scratch.sums + g * max_lanes;
    const float tile_max = S::reduce_max(tile_scores);
    if (tile_max > scratch.maxima[g]) {
        const auto shrink = S::set(exp2_of<S>(scratch.maxima[g] - tile_max));
        scratch.maxima[g] = tile_max;
        S::store(sums, S::mul(S::load(sums), shrink));
        float* acc = scratch.acc + g * padded;
        for (std::size_t d = 0; d < padded; d += S::width) S::store(acc + d, S::mul(S::load(acc + d), shrink));
    }
    const auto weights = exp2<S>(S::sub(tile_scores, S::set(scratch.maxima[g])));
    S::store(scratch.weights + g * max_lanes, weights);
    S::store(sums, S::add(S::load(sums), weights));
}

template <typename S, typename KV, typename Width>
void attend_tokens(const KernelShape& shape, const HeadKv& kv, std::int32_t begin, std::int32_t end, Scratch& scratch,
                   Width padded) {
    const KV* keys = static_cast<const KV*>(kv.pool);
    const KV* values = keys + shape.value_offset;
    std::int32_t num_tokens = 0;
    for (std::int32_t position = begin; position < end; position += num_tokens) {
        // Tiles end at multiples of the width, so that they do not straddle blocks that are such multiples.
        num_tokens = smaller(S::width - position % S::width, end - position);
        prefetch_tile(shape, values, kv.block_table, position, num_tokens);
        const float* tile =
            read_tile<S>(shape, keys, kv.block_table, position, num_tokens, scratch.key_tile, padded);
        for (std::int32_t g = 0; g < shape.group; ++g) {
            auto tile_scores = scores<S>(scratch.q + g * padded, tile, padded);
            if (num_tokens < S::width) tile_scores = S::keep_first(tile_scores, num_tokens, -__builtin_inff());
            weigh<S>(tile_scores, g, scratch, padded);
        }
        const std::int32_t next = position + num_tokens;
        if (next < end) prefetch_tile(shape, keys, kv.block_table, next, smaller(S::width, end - next));
        tile = read_tile<S>(shape, values, kv.block_table, position, num_tokens, scratch.value_tile, padded);
        std::int32_t g = 0;
        for (; g + 2 <= shape.group; g += 2)
            add_values<S, 2>(scratch.weights + g * max_lanes, tile, num_tokens, scratch.acc + g * padded, padded);
        if (g < shape.group)
            add_values<S, 1>(scratch.weights + g * max_lanes, tile, num_tokens, scratch.acc + g * padded, padded);
    }
}

template <typename S, typename X>
void finish(const KernelShape& shape, const Scratch& scratch, X* out) {
    for (std::int32_t g = 0; g < shape.group; ++g) {
        const float sum = S::reduce_add(S::load(scratch.sums + g * max_lanes));
        convert<S>(scratch.acc + g * padded_dim(shape), out + g * shape.head_dim, shape.head_dim, 1.0f / sum);
    }
}

template <typename S>
void save_partial(const KernelShape& shape, const Scratch& scratch, float* partial) {
    const std::size_t padded = padded_dim(shape);
    for (std::int32_t g = 0; g < shape.group; ++g) {
        float* row = partial + g * partial_row_floats(shape);
        convert<S>(scratch.acc + g * padded, row, static_cast<std::int32_t>(padded), 1.0f);
        row[padded] = scratch.maxima[g];
        row[padded + 1] = S::reduce_add(S::load(scratch.sums + g * max_lanes));
    }
}

// Log-sum-exp merge: each span's accumulator and sum, brought to the common maximum.
template <typename S, typename X>
void merge_partials(const KernelShape& shape, const float* partials, std::int32_t num_partials, X* out) {
    const std::size_t padded = padded_dim(shape);
    const std::size_t span_stride = partial_floats(shape);
    for (std::int32_t g = 0; g < shape.group; ++g) {
        const float* rows = partials + g * partial_row_floats(shape);
        float maximum = rows[padded];
        for (std::int32_t s = 1; s < num_partials; ++s) {
            const float other = rows[s * span_stride + padded];
            if (other > maximum) maximum = other;
        }
        float merged[256 + max_lanes] = {};
        float sum = 0.0f;
        for (std::int32_t s = 0; s < num_partials; ++s) {
            const float* row = rows + s * span_stride;
            const float factor = exp2_of<S>(row[padded] - maximum);
            sum += factor * row[padded + 1];
            for (std::size_t d = 0; d < padded; d += S::width)
                S::store(merged + d, S::fma(S::load(row + d), S::set(factor), S::load(merged + d)));
        }
        convert<S>(merged, out + g * shape.head_dim, shape.head_dim, 1.0f / sum);
    }
}

template <typename S>
void append(const KernelShape& shape, const HeadKv& kv, std::int32_t position, const void* k, const void* v) {
    with_type(shape.exchange_dtype, [&]<typename X>(X*) {
        with_type(shape.kv_dtype, [&]<typename KV>(KV*) {
            KV* row = row_of(shape, static_cast<KV*>(kv.pool), kv.block_table, position);
            convert<S>(static_cast<const X*>(k), row, shape.head_dim, 1.0f);
            convert<S>(static_cast<const X*>(v), row + shape.value_offset, shape.head_dim, 1.0f);
        });
    });
}

template <typename S>
void attend(const KernelShape& shape, const HeadKv& kv, std::int32_t begin, std::int32_t end, const void* q,
            float* memory, float* partial, void* out) {
    Scratch scratch(shape, memory);
    with_type(shape.exchange_dtype, [&]<typename X>(X*) { start<S>(shape, static_cast<const X*>(q), scratch); });
    with_type(shape.kv_dtype, [&]<typename KV>(KV*) {
        with_width(padded_dim(shape), [&](auto padded) { attend_tokens<S, KV>(shape, kv, begin, end, scratch, padded); });
    });
    if (out == nullptr) {
        save_partial<S>(shape, scratch, partial);
    } else {
        with_type(shape.exchange_dtype, [&]<typename X>(X*) { finish<S>(shape, scratch, static_cast<X*>(out)); });
    }
}

template <typename S>
void merge(const KernelShape& shape, const float* partials, std::int32_t num_partials, void* out) {
    with_type(shape.exchange_dtype, [&]<typename X>(X*) {
        merge_partials<S>(shape, partials, num_partials, static_cast<X*>(out));
    });
}

template <typename S>
constexpr Kernel make_kernel(const char* name) {
    return {name, &append<S>, &attend<S>, &merge<S>};
}

}  // namespace
}  // namespace neoflex
