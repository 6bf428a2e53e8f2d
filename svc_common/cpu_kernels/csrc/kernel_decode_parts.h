// What decode attention over floats and over int8 shares: scratch, parts of chunks, and what is fetched ahead.
//
// Included by kernel_body.h; its rules hold here. Keys and values are read once, in chunks of tokens:
//
//   scores[head, token] = q . key      weights by softmax, rescaled as the maximum grows      acc += weights . values
//
// Several query heads share each vector of keys or values, in registers. What comes next, the next head's part of the
// same blocks or the next chunk's blocks, is prefetched, as blocks lie anywhere and the processor can't foresee them.
#pragma once

#include "kernel_math.h"

namespace neoflex {
namespace {

// Query heads that share a loaded vector.
constexpr std::int32_t max_heads = 4;
constexpr std::size_t cache_line = 64;

// The parts of one KV head's `scratch`; see scratch_floats.
struct DecodeScratch {
    DecodeScratch(const KernelShape& shape, float* memory, std::int32_t kv_head) : padded(padded_dim(shape)) {
        const std::size_t group = shape.group;
        acc = memory + kv_head * scratch_floats(shape);
        q = acc + group * padded;
        weights = q + group * padded;
        pairs = weights + group * decode_stride;
        sums = pairs + group * pair_stride / 2;
        maxima = sums + group * max_lanes;
        q_last = maxima + group;
        q_scales = q_last + group;
        places = q_scales + group;
    }

    std::size_t padded;
    float* acc;       // [group, padded], columns in the order of load_columns
    float* q;         // per tile of heads [head_dim / 2, heads, 2], as fp32, or as bf16 or int16 for such products
    float* weights;   // [group, decode_stride] of the current chunk
    float* pairs;     // [group, pair_stride] the same in bf16 or int16
    float* sums;      // [group, max_lanes] of the weights so far, by lane
    float* maxima;    // [group] of the scores so far
    float* q_last;    // [group]: the last of an odd number of dimensions
    float* q_scales;  // [group]: what q's integers count
    float* places;    // [pair_stride] weights of one query head where their pairs are
};

// Calls f(first head, number of heads as a constant) for tiles of at most max_heads, as equal as can be.
template <typename F>
[[gnu::always_inline]] inline void for_head_tiles(std::int32_t group, F f) {
    const std::int32_t num_tiles = (group + max_heads - 1) / max_heads;
    for (std::int32_t tile = 0; tile < num_tiles; ++tile) {
        const std::int32_t head = tile * group / num_tiles;
        switch ((tile + 1) * group / num_tiles - head) {
            case 1: f.template operator()<1>(head); break;
            case 2: f.template operator()<2>(head); break;
            case 3: f.template operator()<3>(head); break;
            default: f.template operator()<4>(head); break;
        }
    }
}

// A maximum and a rescaling for each query head cost less the more tokens share them; but a head's keys in a chunk have
// to fit into half of a first-level cache, as several tiles of query heads read them.
template <typename KV>
std::int32_t tokens_of_chunk(const KernelShape& shape) {
    constexpr std::size_t most_key_bytes = 16 * 1024;
    return shape.head_dim * sizeof(KV) * most_decode_tokens <= most_key_bytes ? most_decode_tokens
                                                                               : most_decode_tokens / 2;
}

// Sets sums and maxima to those of no token.
template <typename S>
void clear_sums(const KernelShape& shape, DecodeScratch& scratch) {
    for (std::size_t i = 0; i < shape.group * scratch.padded; i += S::width) S::store(scratch.acc + i, S::zero());
    for (std::int32_t g = 0; g < shape.group; ++g) {
        for (std::size_t i = 0; i < max_lanes; i += S::width) S::store(scratch.sums + g * max_lanes + i, S::zero());
        scratch.maxima[g] = -infinity;
    }
}

// A part of a chunk, and where to fetch the same part of a later block from.
template <typename KV>
struct DecodePart : Part<KV> {
    const char* next_keys;       // of its tokens, as if they lay one after the other
    std::ptrdiff_t next_values;  // bytes from its values to the later ones
};

// Into the second-level cache: the first level takes too few misses at a time for the memory's latency.
template <std::size_t Bytes>
[[gnu::always_inline]] inline void fetch(const char* from) {
    for (std::size_t line = 0; line < Bytes; line += cache_line) __builtin_prefetch(from + line, 0, 2);
}

// The scales of this and the heads before it.
inline void fetch_scales(const KernelShape& shape, const HeadKv& kv, std::int32_t block) {
    const float* scales = kv.scales + static_cast<std::size_t>(block) * shape.scale_stride;
    __builtin_prefetch(scales, 0, 2);
    __builtin_prefetch(scales + shape.scale_stride / 2, 0, 2);
}

// Splits tokens [position, position + count) into parts; returns how many. `next_head` elements from a head on lies the
// one whose turn comes next in this chunk; 0: the next chunk's turn comes, with the head `first_head` elements back.
template <typename KV>
std::int32_t cut_chunk(const KernelShape& shape, const HeadKv& kv, std::int32_t position, std::int32_t count,
                       std::int32_t end, std::ptrdiff_t next_head, std::ptrdiff_t first_head, DecodePart<KV>* parts) {
    const std::int32_t blocks_ahead = (tokens_of_chunk<KV>(shape) + shape.block_tokens - 1) / shape.block_tokens;
    std::int32_t num_parts = 0;
    for (std::int32_t first = 0; first < count;) {
        DecodePart<KV>& part = parts[num_parts++];
        static_cast<Part<KV>&>(part) = part_at<KV>(shape, kv, position + first, position + count, first);
        std::ptrdiff_t next = next_head;
        const std::int32_t block = (position + first) / shape.block_tokens;
        // Past the end this part itself, which costs nothing.
        if (next == 0 && (block + blocks_ahead) * shape.block_tokens < end) {
            const std::ptrdiff_t blocks = std::ptrdiff_t{kv.block_table[block + blocks_ahead]} - kv.block_table[block];
            next = blocks * static_cast<std::ptrdiff_t>(shape.block_stride) - first_head;
            if constexpr (is_int8<KV>) fetch_scales(shape, kv, kv.block_table[block + blocks_ahead]);
        }
        part.next_values = next * static_cast<std::ptrdiff_t>(sizeof(KV));
        part.next_keys = reinterpret_cast<const char*>(part.keys) + part.next_values +
                         sizeof(KV) * part.offset * shape.head_dim;
        first += part.count;
    }
    return num_parts;
}

}  // namespace
}  // namespace neoflex
