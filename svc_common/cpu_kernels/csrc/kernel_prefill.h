// Prefill attention of one KV head's queries at consecutive tokens, causal.
//
// Included by kernel_body.h; its rules hold here. Rows are queries: tokens times the heads of a group. Keys and values
// come in chunks of tokens, each converted to fp32 once for all rows of the tile; then two matrix products per chunk:
//
//   scores[row, token] = q . keys            weights by softmax, masked            acc[row, :] += weights . values
#pragma once

#include "kernel_blocks.h"
#include "kernel_math.h"

namespace neoflex {
namespace {

// The parts of `scratch`; see prefill_scratch_floats.
struct PrefillScratch {
    PrefillScratch(const KernelShape& shape, float* memory) : padded(padded_dim(shape)) {
        const std::size_t rows = max_prefill_rows(shape);
        keys = memory;
        values = keys + padded * chunk_stride;
        q = values + padded * chunk_tokens;
        acc = q + rows * padded;
        weights = acc + rows * padded;
        sums = weights + rows * chunk_stride;
        maxima = sums + rows * max_lanes;
    }

    std::size_t padded;
    float* keys;     // [head_dim, chunk_stride]
    float* values;   // [chunk_tokens, padded]
    float* q;        // per rows_together rows: [head_dim, rows_together]
    float* acc;      // [rows, padded]
    float* weights;  // [rows, chunk_stride]
    float* sums;     // [rows, max_lanes] of the weights so far, by lane
    float* maxima;   // [rows] of the scores so far
};

template <typename S, typename X>
void start_rows(const KernelShape& shape, const PrefillTile& tile, PrefillScratch& scratch) {
    const X* q = static_cast<const X*>(tile.q);
    const std::int32_t num_rows = tile.num_tokens * shape.group;
    for (std::int32_t row = 0; row % rows_together != 0 || row < num_rows; ++row) {
        float* to = scratch.q + (row / rows_together * scratch.padded) * rows_together + row % rows_together;
        const X* from = q + row / shape.group * tile.q_stride + row % shape.group * shape.head_dim;
        for (std::int32_t d = 0; d < shape.head_dim; ++d)
            to[d * rows_together] = row < num_rows ? to_float(from[d]) : 0.0f;
        float* acc = scratch.acc + row * scratch.padded;
        for (std::size_t d = 0; d < scratch.padded; d += S::width) S::store(acc + d, S::zero());
        for (std::size_t i = 0; i < max_lanes; i += S::width) S::store(scratch.sums + row * max_lanes + i, S::zero());
        scratch.maxima[row] = -infinity;
    }
}

template <typename S, typename KV>
[[gnu::always_inline]] inline typename S::Vec scaled(typename S::Vec x, float scale) {
    return is_int8<KV> ? S::mul(x, S::set(scale)) : x;
}

template <typename S, typename KV>
void stage_keys(const KernelShape& shape, const Part<KV>& part, float* to) {
    const std::size_t stride = shape.block_tokens;
    const std::int32_t num_pairs = shape.head_dim / 2;
    for (std::int32_t i = 0; i < num_pairs; ++i) {
        const KV* keys = part.keys + 2 * i * stride + part.offset * key_pack<KV>;
        float* rows = to + 2 * i * chunk_stride + part.first;
        // The last vector may reach past the part; the next part overwrites that, or nobody looks at it.
        for (std::int32_t t = 0; t < part.count; t += S::width) {
            typename S::Vec first, second;
            load_key_pair<S>(keys + t * key_pack<KV>, stride, first, second);
            S::store(rows + t, scaled<S, KV>(first, part.key_scale));
            S::store(rows + chunk_stride + t, scaled<S, KV>(second, part.key_scale));
        }
    }
    if (shape.head_dim % 2) {
        const KV* keys = part.keys + 2 * num_pairs * stride + part.offset;
        float* row = to + 2 * num_pairs * chunk_stride + part.first;
        for (std::int32_t t = 0; t < part.count; t += S::width)
            S::store(row + t, scaled<S, KV>(S::load(keys + t), part.key_scale));
    }
}

// Values of a part's tokens, to rows of `padded` floats.
template <typename S, typename KV>
void stage_values(const KernelShape& shape, const Part<KV>& part, std::size_t padded, float* to) {
    if constexpr (is_int8<KV>) {
        read_values<S>(shape, part.values, part.offset, part.count, part.value_scale, padded, to);
    } else {
        for (std::int32_t t = 0; t < part.count; ++t)
            convert<S>(part.values + static_cast<std::size_t>(t) * shape.head_dim, to + t * padded, shape.head_dim, 1.0f);
    }
}

// Converts keys and values of tokens [position, position + count).
template <typename S, typename KV>
void stage_chunk(const KernelShape& shape, const HeadKv& kv, std::int32_t position, std::int32_t count,
                 PrefillScratch& scratch) {
    for (std::int32_t first = 0; first < count;) {
        const Part<KV> part = part_at<KV>(shape, kv, position + first, position + count, first);
        stage_keys<S>(shape, part, scratch.keys);
        stage_values<S>(shape, part, scratch.padded, scratch.values + first * scratch.padded);
        first += part.count;
    }
}

// sums[r, :] += a[r, i] * b[i, :] over i < count, for rows_together rows and `Vectors` vectors of columns. `b` has rows
// of `b_stride`; a[r, i] is at a[r * a_row + i * a_step].
template <typename S, int Vectors>
[[gnu::always_inline]] inline void multiply(const float* a, std::size_t a_row, std::size_t a_step, const float* b,
                                            std::size_t b_stride, std::int32_t count, float* sums,
                                            std::size_t sums_stride, bool accumulate) {
    typename S::Vec acc[rows_together][Vectors];
#pragma GCC unroll 24
    for (int i = 0; i < rows_together * Vectors; ++i)
        acc[i / Vectors][i % Vectors] =
            accumulate ? S::load(sums + i / Vectors * sums_stride + i % Vectors * S::width) : S::zero();
    for (std::int32_t i = 0; i < count; ++i) {
        typename S::Vec x[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) x[v] = S::load(b + v * S::width);
#pragma GCC unroll 6
        for (int r = 0; r < rows_together; ++r) {
            const auto factor = S::set(a[r * a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) acc[r][v] = S::fma(x[v], factor, acc[r][v]);
        }
        a += a_step;
        b += b_stride;
    }
#pragma GCC unroll 24
    for (int i = 0; i < rows_together * Vectors; ++i)
        S::store(sums + i / Vectors * sums_stride + i % Vectors * S::width, acc[i / Vectors][i % Vectors]);
}

template <typename S>
void score_rows(const KernelShape& shape, std::int32_t row, std::int32_t count, PrefillScratch& scratch) {
    const float* q = scratch.q + row * scratch.padded;
    float* scores = scratch.weights + row * chunk_stride;
    for (std::int32_t t = 0; t < count; t += S::product_vectors * S::width)
        multiply<S, S::product_vectors>(q, 1, rows_together, scratch.keys + t, chunk_stride, shape.head_dim, scores + t,
                                        chunk_stride, false);
}

template <typename S>
void sum_rows(std::int32_t row, std::int32_t count, PrefillScratch& scratch) {
    const float* weights = scratch.weights + row * chunk_stride;
    float* acc = scratch.acc + row * scratch.padded;
    std::size_t d = 0;
    for (; d + S::product_vectors * S::width <= scratch.padded; d += S::product_vectors * S::width)
        multiply<S, S::product_vectors>(weights, chunk_stride, 1, scratch.values + d, scratch.padded, count, acc + d,
                                        scratch.padded, true);
    for (; d < scratch.padded; d += 2 * S::width)
        multiply<S, 2>(weights, chunk_stride, 1, scratch.values + d, scratch.padded, count, acc + d, scratch.padded,
                       true);
}

// Weights of one row in the chunk [position, position + count): 0 where its token sees nothing.
template <typename S>
void weigh_row(const KernelShape& shape, const PrefillTile& tile, std::int32_t row, std::int32_t position,
               std::int32_t count, PrefillScratch& scratch) {
    const std::int32_t query = tile.position + row / shape.group;
    const std::int32_t end = smaller(query + 1 - position, count);
    const std::int32_t begin = tile.sliding_window > 0 ? query + 1 - tile.sliding_window - position : 0;
    float* weights = scratch.weights + row * chunk_stride;
    std::int32_t weighed = 0;
    if (end > 0 && begin < end) {
        weigh<S>(shape, weights, begin, end, scratch.maxima[row], scratch.sums + row * max_lanes,
                 scratch.acc + row * scratch.padded);
        weighed = (end + S::width - 1) / S::width * S::width;
    }
    for (std::int32_t i = weighed; i < count; ++i) weights[i] = 0.0f;
}

template <typename S, typename KV>
void attend_rows(const KernelShape& shape, const HeadKv& kv, const PrefillTile& tile, PrefillScratch& scratch) {
    const std::int32_t end = tile.position + tile.num_tokens;
    const std::int32_t num_rows = tile.num_tokens * shape.group;
    std::int32_t position = 0;
    if (tile.sliding_window > 0 && tile.position >= tile.sliding_window)
        position = tile.position + 1 - tile.sliding_window;
    for (; position < end; position += chunk_tokens) {
        const std::int32_t count = smaller(chunk_tokens, end - position);
        stage_chunk<S, KV>(shape, kv, position, count, scratch);
        for (std::int32_t row = 0; row < num_rows; row += rows_together) {
            score_rows<S>(shape, row, count, scratch);
            for (std::int32_t r = row; r < smaller(row + rows_together, num_rows); ++r)
                weigh_row<S>(shape, tile, r, position, count, scratch);
            sum_rows<S>(row, count, scratch);
        }
    }
}

template <typename S, typename X>
void finish_rows(const KernelShape& shape, const PrefillTile& tile, const PrefillScratch& scratch) {
    for (std::int32_t row = 0; row < tile.num_tokens * shape.group; ++row) {
        X* out = static_cast<X*>(tile.out) + row / shape.group * tile.out_stride + row % shape.group * shape.head_dim;
        const float sum = S::reduce_add(S::load(scratch.sums + row * max_lanes));
        convert<S>(scratch.acc + row * scratch.padded, out, shape.head_dim, 1.0f / sum);
    }
}

template <typename S>
void prefill(const KernelShape& shape, const HeadKv& kv, const PrefillTile& tile, float* memory) {
    PrefillScratch scratch(shape, memory);
    with_float_type(shape.exchange_dtype, [&]<typename X>(X*) { start_rows<S, X>(shape, tile, scratch); });
    with_kv_type(shape.kv_dtype, [&]<typename KV>(KV*) { attend_rows<S, KV>(shape, kv, tile, scratch); });
    with_float_type(shape.exchange_dtype, [&]<typename X>(X*) { finish_rows<S, X>(shape, tile, scratch); });
}

}  // namespace
}  // namespace neoflex
