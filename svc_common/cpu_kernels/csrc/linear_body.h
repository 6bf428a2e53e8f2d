// Rows times one panel of weights: the one body behind the matrix products of every instruction set.
//
// Included by one translation unit per instruction set, each with its own compiler flags. All of it is in an unnamed
// namespace and calls no library code: an inline function shared between those units could be linked in the version
// for the wrong processor.
//
// A tile of rows is summed in registers, all columns of the panel at once. With few rows the weights' way from memory
// is what takes time, with many the multiply-adds.
#pragma once

#include "elementwise_body.h"
#include "half.h"
#include "linear_integer.h"
#include "linear_kernel.h"
#include "linear_tile.h"

namespace neoflex {
namespace {

template <typename S, int R>
struct Sums {
    typename S::Vec vectors[R][panel_vectors<S>];
};

template <typename S, int R>
[[gnu::always_inline]] inline void multiply_add(Sums<S, R>& sums, const RowPointers<R, float>& rows, std::int32_t k,
                                                const typename S::Vec* columns) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const auto x = S::set(rows.at(r, k));
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) sums.vectors[r][v] = S::fma(x, columns[v], sums.vectors[r][v]);
    }
}

// fp32 and fp16 weights.
template <typename S, int R, typename W>
[[gnu::always_inline]] inline void multiply_depths(Sums<S, R>& sums, const RowPointers<R, float>& rows,
                                                   const W* weights, std::int32_t depth) {
    for (std::int32_t k = 0; k < depth; ++k, weights += S::panel_columns) {
        typename S::Vec columns[panel_vectors<S>];
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) {
            prefetch<S>(weights, v, S::width);
            columns[v] = S::load(weights + v * S::width);
        }
        multiply_add<S, R>(sums, rows, k, columns);
    }
}

// bf16 weights, widened.
template <typename S, int R>
[[gnu::always_inline]] inline void multiply_depths(Sums<S, R>& sums, const RowPointers<R, float>& rows,
                                                   const BFloat* weights, std::int32_t depth) {
    typename S::Vec columns[panel_vectors<S>];
    std::int32_t k = 0;
    for (; k + 2 <= depth; k += 2, weights += 2 * S::panel_columns) {
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) {
            prefetch<S>(weights, v, 2 * S::width);
            columns[v] = S::load_first(weights + 2 * v * S::width);
        }
        multiply_add<S, R>(sums, rows, k, columns);
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) columns[v] = S::load_second(weights + 2 * v * S::width);
        multiply_add<S, R>(sums, rows, k + 1, columns);
    }
    if (k < depth) {
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) columns[v] = S::load_first(weights + 2 * v * S::width);
        multiply_add<S, R>(sums, rows, k, columns);
    }
}

// bf16 weights and rows, by instructions that multiply pairs.
template <typename S, int R>
[[gnu::always_inline]] inline void multiply_depths(Sums<S, R>& sums, const RowPointers<R, Word>& rows,
                                                   const BFloat* weights, std::int32_t depth) {
    for (std::int32_t k = 0; k < (depth + 1) / 2; ++k, weights += 2 * S::panel_columns) {
        typename S::Pairs columns[panel_vectors<S>];
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v) {
            prefetch<S>(weights, v, 2 * S::width);
            columns[v] = S::load_pairs(weights + 2 * v * S::width);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto x = S::set_pair(rows.at(r, k).bits);
#pragma GCC unroll 16
            for (int v = 0; v < panel_vectors<S>; ++v)
                sums.vectors[r][v] = S::add_pair_products(sums.vectors[r][v], x, columns[v]);
        }
    }
}

template <typename S, int R, typename X, typename W>
void multiply_tile(const X* rows, std::size_t row_stride, const W* weights, std::int32_t depth, bool start,
                   float* sums) {
    Sums<S, R> tile;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v)
            tile.vectors[r][v] = start ? S::zero() : S::load(sums + r * S::panel_columns + v * S::width);
    multiply_depths<S, R>(tile, RowPointers<R, X>(rows, row_stride), weights, depth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < panel_vectors<S>; ++v)
            S::store(sums + r * S::panel_columns + v * S::width, tile.vectors[r][v]);
}

// Calls multiply_tile for a number of rows known only now.
template <typename S, typename X, typename W, int R = S::tile_rows>
[[gnu::always_inline]] inline void multiply_some_rows(std::int32_t num_rows, const X* rows, std::size_t row_stride,
                                                      const W* weights, std::int32_t depth, bool start, float* sums) {
    if constexpr (R > 1) {
        if (num_rows < R)
            return multiply_some_rows<S, X, W, R - 1>(num_rows, rows, row_stride, weights, depth, start, sums);
    }
    multiply_tile<S, R>(rows, row_stride, weights, depth, start, sums);
}

template <typename S, typename X, typename W>
void accumulate_rows(const X* rows, std::size_t row_stride, std::int32_t num_rows, const W* weights,
                     std::int32_t depth, bool start, float* sums) {
    in_tiles<S::tile_rows>(num_rows, [&](std::int32_t first, std::int32_t count) {
        multiply_some_rows<S>(count, rows + first * row_stride, row_stride, weights, depth, start,
                              sums + first * S::panel_columns);
    });
}

template <typename S>
void accumulate(WeightType type, const void* rows, std::size_t row_stride, std::int32_t num_rows, const void* weights,
                std::int32_t depth, bool start, float* sums) {
    const auto* wide = static_cast<const float*>(rows);
    const auto* words = static_cast<const Word*>(rows);
    const auto* bytes = static_cast<const std::byte*>(weights);
    const auto run = [&]<typename X, typename W>(const X* typed_rows, const W* typed_weights) {
        accumulate_rows<S>(typed_rows, row_stride, num_rows, typed_weights, depth, start, sums);
    };
    const auto run_groups = [&]<WeightType quantised>() {
        accumulate_groups<S, quantised>(words, row_stride, num_rows, bytes, num_units(quantised, depth), start, sums);
    };
    switch (type) {
        case WeightType::fp32: return run(wide, static_cast<const float*>(weights));
        case WeightType::fp16: return run(wide, static_cast<const Half*>(weights));
        case WeightType::bf16:
            if constexpr (S::rounds_rows) {
                return run(words, static_cast<const BFloat*>(weights));
            } else {
                return run(wide, static_cast<const BFloat*>(weights));
            }
        case WeightType::int8: return run_groups.template operator()<WeightType::int8>();
        case WeightType::int4: return run_groups.template operator()<WeightType::int4>();
    }
}

template <typename S>
void round_row(const float* row, std::int32_t depth, std::uint16_t* out) {
    auto* rounded = reinterpret_cast<BFloat*>(out);
    std::int32_t k = 0;
    for (; k + S::width <= depth; k += S::width) S::store(rounded + k, S::load(row + k));
    for (; k < depth; ++k) store_one(rounded + k, row[k]);
    if (depth % 2 != 0) rounded[depth].bits = 0;
}

template <typename S>
constexpr LinearKernel make_linear_kernel(const char* name) {
    static_assert(S::panel_columns <= max_panel_columns && S::panel_columns % (2 * S::width) == 0);
    return {name,      S::panel_columns,    S::rounds_rows, &round_row<S>, &quantise_row<S>, &accumulate<S>,
            &store<S>, &store_activated<S>, &normalise<S>,  &rotate<S>,    &argmax<S>};
}

}  // namespace
}  // namespace neoflex
