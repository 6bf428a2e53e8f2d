// Tiles of rows, for linear_body.h, whose rules apply.
#pragma once

#include <cstddef>
#include <cstdint>

namespace neoflex {
namespace {

// Read ahead of the multiply-adds, in bytes: the processor's own prefetching ends at pages and starts slowly.
constexpr std::size_t prefetch_bytes = 4096;

template <typename S>
constexpr int panel_vectors = S::panel_columns / S::width;

// Two neighbouring numbers of 16 bits of a row.
struct Word {
    std::uint32_t bits;
};

// Where a tile's rows are: r0, r4 and r8, from which the others are addressed by small multiples of the stride.
template <int R, typename X>
struct RowPointers {
    const X* every_fourth[(R + 3) / 4];
    std::size_t stride;

    RowPointers(const X* rows, std::size_t row_stride) : stride(row_stride) {
        for (int i = 0; i < (R + 3) / 4; ++i) every_fourth[i] = rows + 4 * i * row_stride;
    }
    X at(int row, std::int32_t k) const { return every_fourth[row / 4][(row % 4) * stride + k]; }
};

template <typename S, typename W>
[[gnu::always_inline]] inline void prefetch(const W* weights, int vector, int elements) {
    if (vector * elements * sizeof(W) % 64 == 0)
        __builtin_prefetch(reinterpret_cast<const char*>(weights + vector * elements) + prefetch_bytes);
}

// Calls f(first_row, num_rows) for tiles of nearly equal height: a low last one would use few registers.
template <int max_rows, typename F>
[[gnu::always_inline]] inline void in_tiles(std::int32_t num_rows, F f) {
    std::int32_t first = 0;
    for (std::int32_t tiles = (num_rows + max_rows - 1) / max_rows; tiles > 0; --tiles) {
        const std::int32_t rows = (num_rows - first + tiles - 1) / tiles;
        f(first, rows);
        first += rows;
    }
}

}  // namespace
}  // namespace neoflex
