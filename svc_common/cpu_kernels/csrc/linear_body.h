// Rows times one panel of weights: the one body behind the matrix products of every instruction set.
//
// Included by one translation unit per instruction set, each with its own compiler flags. All of it is in an unnamed
// namespace and calls no library code: an inline function shared between those units could be linked in the version
// for the wrong processor.
//
// A tile of rows and vectors of columns is summed in registers. With few rows the weights' way from memory is what
// takes time, with many the multiply-adds.
#pragma once

#include "elementwise_body.h"
#include "half.h"
#include "linear_kernel.h"

namespace neoflex {
namespace {

// Read ahead of the multiply-adds, in bytes: the processor's own prefetching ends at pages and starts slowly.
constexpr std::size_t prefetch_bytes = 4096;

// Where a tile's rows are: r0, r4 and r8, from which the others are addressed by small multiples of the stride.
template <int R>
struct RowPointers {
    const float* every_fourth[(R + 3) / 4];
    std::size_t stride;

    RowPointers(const float* rows, std::size_t row_stride) : stride(row_stride) {
        for (int i = 0; i < (R + 3) / 4; ++i) every_fourth[i] = rows + 4 * i * row_stride;
    }
    float at(int row, std::int32_t k) const { return every_fourth[row / 4][(row % 4) * stride + k]; }
};

template <typename S, int R, int V>
struct Sums {
    typename S::Vec vectors[R][V];
};

template <typename S, int R, int V>
[[gnu::always_inline]] inline void multiply_add(Sums<S, R, V>& sums, const RowPointers<R>& rows, std::int32_t k,
                                                const typename S::Vec* weights) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const auto x = S::set(rows.at(r, k));
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) sums.vectors[r][v] = S::fma(x, weights[v], sums.vectors[r][v]);
    }
}

// One depth of a panel's columns; of bf16, which keeps pairs, see below.
template <typename S, int R, int V, typename W>
[[gnu::always_inline]] inline void multiply_depths(Sums<S, R, V>& sums, const RowPointers<R>& rows, const W* weights,
                                                   std::int32_t depth) {
    for (std::int32_t k = 0; k < depth; ++k, weights += panel_columns) {
        typename S::Vec columns[V];
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) {
            if ((v * S::width * sizeof(W)) % 64 == 0)
                __builtin_prefetch(reinterpret_cast<const char*>(weights + v * S::width) + prefetch_bytes);
            columns[v] = S::load(weights + v * S::width);
        }
        multiply_add<S, R, V>(sums, rows, k, columns);
    }
}

template <typename S, int R, int V>
[[gnu::always_inline]] inline void multiply_depths(Sums<S, R, V>& sums, const RowPointers<R>& rows,
                                                   const BFloat* weights, std::int32_t depth) {
    typename S::Vec columns[V];
    std::int32_t k = 0;
    for (; k + 2 <= depth; k += 2, weights += 2 * panel_columns) {
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) {
            if ((v * S::width * 4) % 64 == 0)
                __builtin_prefetch(reinterpret_cast<const char*>(weights + 2 * v * S::width) + prefetch_bytes);
            columns[v] = S::load_first(weights + 2 * v * S::width);
        }
        multiply_add<S, R, V>(sums, rows, k, columns);
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) columns[v] = S::load_second(weights + 2 * v * S::width);
        multiply_add<S, R, V>(sums, rows, k + 1, columns);
    }
    if (k < depth) {
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) columns[v] = S::load_first(weights + 2 * v * S::width);
        multiply_add<S, R, V>(sums, rows, k, columns);
    }
}

template <typename S, int R, int V, typename W>
void multiply_tile(const float* rows, std::size_t row_stride, const W* weights, std::int32_t depth, bool start,
                   float* sums) {
    Sums<S, R, V> tile;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v)
            tile.vectors[r][v] = start ? S::zero() : S::load(sums + r * panel_columns + v * S::width);
    multiply_depths<S, R, V>(tile, RowPointers<R>(rows, row_stride), weights, depth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) S::store(sums + r * panel_columns + v * S::width, tile.vectors[r][v]);
}

// R rows with all columns of the panel, or as many columns at a time as leave registers for R rows.
template <typename S, int R, typename W>
void multiply_rows(const float* rows, std::size_t row_stride, const W* weights, std::int32_t depth, bool start,
                   float* sums) {
    constexpr int panel_vectors = panel_columns / S::width;
    constexpr int vectors = R <= S::whole_panel_rows ? panel_vectors : S::tile_vectors;
    constexpr int weights_per_column = __is_same(W, BFloat) ? 2 : 1;
    for (int v = 0; v < panel_vectors; v += vectors)
        multiply_tile<S, R, vectors>(rows, row_stride, weights + v * S::width * weights_per_column, depth, start,
                                     sums + v * S::width);
}

// Calls multiply_rows for a number of rows known only now.
template <typename S, typename W, int R = S::tile_rows>
[[gnu::always_inline]] inline void multiply_some_rows(std::int32_t num_rows, const float* rows,
                                                      std::size_t row_stride, const W* weights, std::int32_t depth,
                                                      bool start, float* sums) {
    if constexpr (R > 1) {
        if (num_rows < R) return multiply_some_rows<S, W, R - 1>(num_rows, rows, row_stride, weights, depth, start, sums);
    }
    multiply_rows<S, R>(rows, row_stride, weights, depth, start, sums);
}

template <typename S>
void accumulate(DType weight_type, const float* rows, std::size_t row_stride, std::int32_t num_rows,
                const void* weights, std::int32_t depth, bool start, float* sums) {
    const auto run = [&]<typename W>(const W* typed) {
        // Tiles of nearly equal height: a low last one would use few registers.
        for (std::int32_t tiles = (num_rows + S::tile_rows - 1) / S::tile_rows; tiles > 0; --tiles) {
            const std::int32_t tile_rows = (num_rows + tiles - 1) / tiles;
            multiply_some_rows<S>(tile_rows, rows, row_stride, typed, depth, start, sums);
            num_rows -= tile_rows;
            rows += tile_rows * row_stride;
            sums += tile_rows * panel_columns;
        }
    };
    switch (weight_type) {
        case DType::fp32: return run(static_cast<const float*>(weights));
        case DType::fp16: return run(static_cast<const Half*>(weights));
        case DType::bf16: return run(static_cast<const BFloat*>(weights));
    }
}

template <typename S>
constexpr LinearKernel make_linear_kernel(const char* name) {
    return {name, &accumulate<S>, &store<S>, &store_gated<S>, &rms_norm<S>, &rotate<S>};
}

}  // namespace
}  // namespace neoflex
