// The one body behind every kernel: what a Kernel of kernel.h does, written with the vectors of an instruction set.
//
// Included by one translation unit per instruction set, each with its own compiler flags. All of it is in an unnamed
// namespace and calls no library code: an inline function shared between those units could be linked in the version
// for the wrong processor.
#pragma once

#include "kernel_blocks.h"
#include "kernel_decode.h"
#include "kernel_math.h"
#include "kernel_measure.h"
#include "kernel_prefill.h"

namespace neoflex {
namespace {

template <typename S, typename X>
void finish(const KernelShape& shape, const DecodeScratch& scratch, X* out) {
    for (std::int32_t g = 0; g < shape.group; ++g) {
        const float sum = S::reduce_add(S::load(scratch.sums + g * max_lanes));
        convert<S>(scratch.acc + g * scratch.padded, out + g * shape.head_dim, shape.head_dim, 1.0f / sum);
    }
}

template <typename S>
void save_partial(const KernelShape& shape, const DecodeScratch& scratch, float* partial) {
    for (std::int32_t g = 0; g < shape.group; ++g) {
        float* row = partial + g * partial_row_floats(shape);
        convert<S>(scratch.acc + g * scratch.padded, row, static_cast<std::int32_t>(scratch.padded), 1.0f);
        row[scratch.padded] = scratch.maxima[g];
        row[scratch.padded + 1] = S::reduce_add(S::load(scratch.sums + g * max_lanes));
    }
}

// Log-sum-exp merge of one KV head: each span's accumulator and sum, brought to the common maximum.
template <typename S, typename X>
void merge_partials(const KernelShape& shape, const float* partials, std::int32_t num_partials,
                    std::size_t span_stride, X* out) {
    const std::size_t padded = padded_dim(shape);
    for (std::int32_t g = 0; g < shape.group; ++g) {
        const float* rows = partials + g * partial_row_floats(shape);
        float maximum = rows[padded];
        for (std::int32_t s = 1; s < num_partials; ++s) {
            const float other = rows[s * span_stride + padded];
            if (other > maximum) maximum = other;
        }
        float merged[256 + 2 * max_lanes] = {};
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
void attend(const KernelShape& shape, const HeadKv& kv, std::int32_t num_heads, std::int32_t begin, std::int32_t end,
            const void* q, float* memory, float* partial, void* out) {
    with_kv_type(shape.kv_dtype, [&]<typename KV>(KV*) {
        if constexpr (S::has_bf16_dot && __is_same(KV, BFloat)) {
            // Queries and weights rounded to bf16 are as exact as the output.
            if (shape.exchange_dtype == DType::bf16)
                return attend_span<S, KV, true>(shape, kv, num_heads, begin, end, q, memory);
        }
        attend_span<S, KV, false>(shape, kv, num_heads, begin, end, q, memory);
    });
    for (std::int32_t h = 0; h < num_heads; ++h) {
        DecodeScratch scratch(shape, memory, h);
        if (out == nullptr) {
            save_partial<S>(shape, scratch, partial + h * partial_floats(shape));
        } else {
            with_float_type(shape.exchange_dtype, [&]<typename X>(X*) {
                finish<S>(shape, scratch, static_cast<X*>(out) + h * shape.group * shape.head_dim);
            });
        }
    }
}

template <typename S>
void merge(const KernelShape& shape, const float* partials, std::int32_t num_partials, std::int32_t num_heads,
           void* out) {
    const std::size_t head_floats = partial_floats(shape);
    with_float_type(shape.exchange_dtype, [&]<typename X>(X*) {
        for (std::int32_t h = 0; h < num_heads; ++h)
            merge_partials<S>(shape, partials + h * head_floats, num_partials, num_heads * head_floats,
                              static_cast<X*>(out) + h * shape.group * shape.head_dim);
    });
}

template <typename S>
constexpr Kernel make_kernel(const char* name) {
    return {name, &write<S>, &read_tokens<S>, &attend<S>, &merge<S>, &prefill<S>, &read_words, &multiply_add<S>};
}

}  // namespace
}  // namespace neoflex
