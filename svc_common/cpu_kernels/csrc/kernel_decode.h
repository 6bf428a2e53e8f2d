// Decode attention of adjacent KV heads' queries over a span of their tokens.
//
// Included by kernel_body.h; its rules hold here.
#pragma once

#include "kernel_decode_float.h"
#include "kernel_decode_int8.h"

namespace neoflex {
namespace {

// Heads take turns within a chunk: what they read of a block lies in one piece.
template <typename S, typename KV, bool Dot>
void attend_tokens(const KernelShape& shape, const HeadKv& kv, std::int32_t num_heads, std::int32_t begin,
                   std::int32_t end, float* memory) {
    const auto head_elements = static_cast<std::ptrdiff_t>(head_block_elements(shape));
    DecodePart<KV> parts[most_decode_tokens];
    const std::int32_t chunk = tokens_of_chunk<KV>(shape);
    for (std::int32_t position = begin; position < end; position += chunk) {
        const std::int32_t count = smaller(chunk, end - position);
        for (std::int32_t h = 0; h < num_heads; ++h) {
            const HeadKv head{static_cast<KV*>(kv.pool) + h * head_elements, is_int8<KV> ? kv.scales + h : nullptr,
                              kv.block_table};
            const std::int32_t num_parts = cut_chunk(shape, head, position, count, end,
                                                     h + 1 < num_heads ? head_elements : 0, h * head_elements, parts);
            DecodeScratch scratch(shape, memory, h);
            if constexpr (is_int8<KV>) {
                attend_int8_parts<S>(shape, parts, num_parts, count, scratch);
            } else {
                attend_float_parts<S, KV, Dot>(shape, parts, num_parts, count, scratch);
            }
        }
    }
    for (std::int32_t h = 0; h < num_heads; ++h) {
        const DecodeScratch scratch(shape, memory, h);
        for (std::int32_t g = 0; g < shape.group; ++g)
            order_columns<S, KV>(scratch.acc + g * scratch.padded, scratch.padded);
    }
}

template <typename S, typename KV, bool Dot>
void attend_span(const KernelShape& shape, const HeadKv& kv, std::int32_t num_heads, std::int32_t begin,
                 std::int32_t end, const void* q, float* memory) {
    with_float_type(shape.exchange_dtype, [&]<typename X>(X*) {
        for (std::int32_t h = 0; h < num_heads; ++h) {
            DecodeScratch scratch(shape, memory, h);
            const X* queries = static_cast<const X*>(q) + h * shape.group * shape.head_dim;
            if constexpr (is_int8<KV>) {
                take_int8_queries<S>(shape, queries, scratch);
            } else {
                take_float_queries<Dot>(shape, queries, scratch);
            }
            clear_sums<S>(shape, scratch);
        }
    });
    attend_tokens<S, KV, Dot>(shape, kv, num_heads, begin, end, memory);
}

}  // namespace
}  // namespace neoflex
