// Rows times one panel of int8 or int4 weights. Part of linear_body.h, whose rules apply.
//
// Both sides are multiplied as integers of 16 bits: the products of a group add up exactly, in any order, and only
// then are scaled and added in fp32, group after group.
#pragma once

#include <type_traits>

#include "half.h"
#include "linear_tile.h"
#include "weight_type.h"

namespace neoflex {
namespace {

template <typename S, int R>
struct IntegerSums {
    typename S::Ints vectors[R][panel_vectors<S>];
};

template <typename S, int R>
[[gnu::always_inline]] inline void multiply_add(IntegerSums<S, R>& sums, const RowPointers<R, Word>& rows,
                                                std::int32_t k, const typename S::Int16Pairs* columns) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const auto x = S::set_int16_pair(rows.at(r, k).bits);
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) sums.vectors[r][v] = S::dot(sums.vectors[r][v], x, columns[v]);
    }
}

template <typename S, int R>
[[gnu::always_inline]] inline void multiply_group(IntegerSums<S, R>& sums, const RowPointers<R, Word>& rows,
                                                  const std::int8_t* weights) {
    constexpr std::int32_t pairs = group_depth(WeightType::int8) / 2;
    for (std::int32_t k = 0; k < pairs; ++k, weights += 2 * S::panel_columns) {
        typename S::Int16Pairs columns[panel_vectors<S>];
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) {
            prefetch<S>(weights, v, 2 * S::width);
            columns[v] = S::load_int16_pairs(weights + 2 * v * S::width);
        }
        multiply_add<S, R>(sums, rows, row_group_header_words + k, columns);
    }
}

// Two of int4's numbers.
struct Nibbles {
    std::uint8_t bits;
};

template <typename S, int R>
[[gnu::always_inline]] inline void multiply_group(IntegerSums<S, R>& sums, const RowPointers<R, Word>& rows,
                                                  const Nibbles* weights) {
    constexpr std::int32_t pairs = group_depth(WeightType::int4) / 2;
    for (std::int32_t k = 0; k < pairs; k += 2, weights += 2 * S::panel_columns) {
        typename S::Int16Pairs words[panel_vectors<S>], columns[panel_vectors<S>];
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) {
            prefetch<S>(weights, v, 2 * S::width);
            words[v] = S::load_nibbles(&weights[2 * v * S::width].bits);
            columns[v] = S::lower_nibbles(words[v]);
        }
        multiply_add<S, R>(sums, rows, row_group_header_words + k, columns);
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) columns[v] = S::upper_nibbles(words[v]);
        multiply_add<S, R>(sums, rows, row_group_header_words + k + 1, columns);
    }
}

// Of one row: sums [panel_columns] = (start ? 0 : sums) + integers * row's scale * scales + row's sum * minima.
template <typename S, WeightType type>
[[gnu::always_inline]] inline void add_scaled(const typename S::Ints* integers, const Word* row,
                                              const std::byte* group, bool start, float* sums) {
    using Scale = std::conditional_t<type == WeightType::int8, BFloat, Half>;
    const auto* scales = reinterpret_cast<const Scale*>(group);
    const auto row_scale = S::set(from_bits(row[0].bits)), row_sum = S::set(from_bits(row[1].bits));
#pragma GCC unroll 16
    for (int v = 0; v < panel_vectors<S>; ++v) {
        float* to = sums + v * S::width;
        auto sum = start ? S::zero() : S::load(to);
        if constexpr (type == WeightType::int4)
            sum = S::fma(row_sum, S::load(scales + S::panel_columns + v * S::width), sum);
        const auto scale = S::mul(row_scale, S::load(scales + v * S::width));
        S::store(to, S::fma(S::to_floats(integers[v]), scale, sum));
    }
}

// `weights` [num_groups] as weight_type.h has them, `rows` likewise.
template <typename S, WeightType type, int R>
void multiply_groups(const Word* rows, std::size_t row_stride, const std::byte* weights, std::int32_t groups,
                     bool start, float* sums) {
    using W = std::conditional_t<type == WeightType::int8, std::int8_t, Nibbles>;
    constexpr std::size_t integer_bytes = group_depth(type) * S::panel_columns / (type == WeightType::int8 ? 1 : 2);
    constexpr std::size_t bytes = group_bytes(type, S::panel_columns);
    for (; groups > 0; --groups, start = false, rows += row_group_words(type), weights += bytes) {
        IntegerSums<S, R> integers;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < panel_vectors<S>; ++v) integers.vectors[r][v] = S::no_ints();
        multiply_group<S, R>(integers, RowPointers<R, Word>(rows, row_stride),
                             reinterpret_cast<const W*>(weights + bytes - integer_bytes));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            add_scaled<S, type>(integers.vectors[r], rows + r * row_stride, weights, start,
                                sums + r * S::panel_columns);
    }
}

// Calls multiply_groups for a number of rows known only now.
template <typename S, WeightType type, int R = S::integer_tile_rows>
[[gnu::always_inline]] inline void multiply_groups_of(std::int32_t num_rows, const Word* rows, std::size_t row_stride,
                                                      const std::byte* weights, std::int32_t groups, bool start,
                                                      float* sums) {
    if constexpr (R > 1) {
        if (num_rows < R)
            return multiply_groups_of<S, type, R - 1>(num_rows, rows, row_stride, weights, groups, start, sums);
    }
    multiply_groups<S, type, R>(rows, row_stride, weights, groups, start, sums);
}

template <typename S, WeightType type>
void accumulate_groups(const Word* rows, std::size_t row_stride, std::int32_t num_rows, const std::byte* weights,
                       std::int32_t groups, bool start, float* sums) {
    in_tiles<S::integer_tile_rows>(num_rows, [&](std::int32_t first, std::int32_t count) {
        multiply_groups_of<S, type>(count, rows + first * row_stride, row_stride, weights, groups, start,
                                    sums + first * S::panel_columns);
    });
}

// One row's group of `depth` numbers, read to its end, as weight_type.h has it.
template <typename S>
void quantise_row_group(const float* row, std::int32_t depth, std::uint32_t* out) {
    auto largest = S::zero(), poison = S::zero();  // poison: NaN where a number is not finite
    for (std::int32_t k = 0; k < depth; k += S::width) {
        const auto x = S::load(row + k);
        largest = S::max(largest, S::max(x, S::sub(S::zero(), x)));
        poison = S::fma(x, S::zero(), poison);
    }
    const float bound = S::reduce_max(largest), not_finite = S::reduce_add(poison);
    // So small that its inverse is not finite: zero.
    const bool counts = bound > 1e-30f;
    const auto inverse = S::set(counts ? 32767.0f / bound : 0.0f);
    auto* numbers = reinterpret_cast<std::int16_t*>(out + row_group_header_words);
    for (std::int32_t k = 0; k < depth; k += S::width) S::store(numbers + k, S::mul(S::load(row + k), inverse));
    std::int32_t sum = 0;
    for (std::int32_t k = 0; k < depth; ++k) sum += numbers[k];
    const float scale = (counts ? bound / 32767.0f : 0.0f) + not_finite;
    out[0] = to_bits(scale);
    out[1] = to_bits(scale * static_cast<float>(sum));
}

template <typename S>
void quantise_row(WeightType type, const float* row, std::int32_t depth, std::uint32_t* out) {
    const std::int32_t group = group_depth(type);
    for (; depth > 0; depth -= group, row += group, out += row_group_words(type)) {
        if (depth >= group) {
            quantise_row_group<S>(row, group, out);
            continue;
        }
        float padded[max_group_depth] = {};
        for (std::int32_t k = 0; k < depth; ++k) padded[k] = row[k];
        quantise_row_group<S>(padded, group, out);
    }
}

}  // namespace
}  // namespace neoflex
