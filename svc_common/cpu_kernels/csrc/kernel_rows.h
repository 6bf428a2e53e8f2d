// How the kernels read and write rows of KV: where a token's row lies, and tiles of rows as fp32.
//
// Included by kernel_body.h; the same rules hold here.
#pragma once

#include "half.h"
#include "kernel.h"

namespace neoflex {
namespace {

// A row's padded width where the compiler is to know it: offsets become part of the instructions. Elsewhere the
// width is a std::size_t.
template <std::size_t Value>
struct Constant {
    constexpr operator std::size_t() const { return Value; }
};

template <typename T>
T smaller(T a, T b) {
    return b < a ? b : a;
}

// Converts `count` elements, times `factor`.
template <typename S, typename From, typename To>
void convert(const From* from, To* to, std::int32_t count, float factor) {
    std::int32_t i = 0;
    for (; i + S::width <= count; i += S::width) S::store(to + i, S::mul(S::load(from + i), S::set(factor)));
    for (; i < count; ++i) store_one(to + i, to_float(from[i]) * factor);
}

template <typename T>
T* row_of(const KernelShape& shape, T* pool, const std::int32_t* block_table, std::int32_t position) {
    const auto block = static_cast<std::size_t>(block_table[position / shape.block_tokens]);
    const auto row = static_cast<std::size_t>(position % shape.block_tokens);
    return pool + block * shape.block_stride + row * shape.head_dim;
}

template <typename S, typename KV, typename Width>
[[gnu::always_inline]] inline void widen_rows(const KV* from, float* to, std::int32_t num_rows, Width padded) {
    for (std::int32_t i = 0; i < num_rows; ++i)
        for (std::size_t d = 0; d < padded; d += S::width) S::store(to + i * padded + d, S::load(from + i * padded + d));
}

// Rows of fp32 of a tile's tokens, `padded` floats apart; those past the tile's tokens hold anything. Rows are read
// where they are if they are fp32, fill whole vectors, and all lanes lie in one block; others are staged.
template <typename S, typename KV, typename Width>
const float* read_tile(const KernelShape& shape, const KV* pool, const std::int32_t* block_table,
                       std::int32_t position, std::int32_t num_tokens, float* stage, Width padded) {
    const bool whole_vectors = static_cast<std::size_t>(shape.head_dim) == padded;
    if constexpr (__is_same(KV, float)) {
        if (whole_vectors && position % shape.block_tokens + S::width <= shape.block_tokens)
            return row_of(shape, pool, block_table, position);
    }
    for (std::int32_t t = 0; t < num_tokens;) {
        const std::int32_t left_in_block = shape.block_tokens - (position + t) % shape.block_tokens;
        const std::int32_t num_rows = smaller(num_tokens - t, left_in_block);
        const KV* rows = row_of(shape, pool, block_table, position + t);
        float* to = stage + t * padded;
        if (whole_vectors) {
            widen_rows<S>(rows, to, num_rows, padded);
        } else {
            // Columns past head_dim are zero from the start and stay so.
            for (std::int32_t i = 0; i < num_rows; ++i)
                convert<S>(rows + i * shape.head_dim, to + i * padded, shape.head_dim, 1.0f);
        }
        t += num_rows;
    }
    return stage;
}

// Blocks lie anywhere, so the processor can't foresee the next tile.
template <typename KV>
void prefetch_tile(const KernelShape& shape, const KV* pool, const std::int32_t* block_table, std::int32_t position,
                   std::int32_t num_tokens) {
    const auto* bytes = reinterpret_cast<const char*>(row_of(shape, pool, block_table, position));
    const std::size_t num_bytes = sizeof(KV) * num_tokens * shape.head_dim;
    for (std::size_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(bytes + i);
}

// Calls f with a null pointer of the element type.
template <typename F>
void with_type(DType dtype, F f) {
    switch (dtype) {
        case DType::fp32: return f(static_cast<float*>(nullptr));
        case DType::fp16: return f(static_cast<Half*>(nullptr));
        case DType::bf16: return f(static_cast<BFloat*>(nullptr));
    }
}

// Calls f with the padded width, as a constant for those of most models.
template <typename F>
void with_width(std::size_t padded, F f) {
    if (padded == 64) return f(Constant<64>{});
    if (padded == 128) return f(Constant<128>{});
    f(padded);
}

}  // namespace
}  // namespace neoflex
