// Decode attention of adjacent KV heads' queries over a span of their tokens.
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
        pairs = reinterpret_cast<BFloat*>(weights + group * chunk_stride);
        sums = weights + group * (chunk_stride + chunk_stride / 2);
        maxima = sums + group * max_lanes;
        q_last = maxima + group;
    }

    std::size_t padded;
    float* acc;      // [group, padded], columns in the order of load_columns
    float* q;        // per tile of heads [head_dim / 2, heads, 2], as fp32 or, for products of bf16, as bf16
    float* weights;  // [group, chunk_stride] of the current chunk
    BFloat* pairs;   // the same in bf16
    float* sums;     // [group, max_lanes] of the weights so far, by lane
    float* maxima;   // [group] of the scores so far
    float* q_last;   // [group]: the last of an odd number of dimensions
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

template <typename S, bool Dot, typename X>
void start(const KernelShape& shape, const X* q, DecodeScratch& scratch) {
    const std::int32_t num_pairs = shape.head_dim / 2;
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        float* to = scratch.q + head * scratch.padded;
        for (std::int32_t h = 0; h < Heads; ++h) {
            const X* from = q + (head + h) * shape.head_dim;
            for (std::int32_t i = 0; i < 2 * num_pairs; ++i) {
                const std::int32_t place = (i / 2 * Heads + h) * 2 + i % 2;
                if constexpr (Dot) {
                    store_one(reinterpret_cast<BFloat*>(to) + place, to_float(from[i]));
                } else {
                    to[place] = to_float(from[i]);
                }
            }
            scratch.q_last[head + h] = shape.head_dim % 2 ? to_float(from[shape.head_dim - 1]) : 0.0f;
        }
    });
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

// Scores of `width` tokens from `offset` of a block on: one vector per head, to rows of `out`. Fetches `next` at the
// pace of reading.
template <typename S, typename KV, bool Dot, int Heads>
[[gnu::always_inline]] inline void score_tile(const KernelShape& shape, const float* q, const float* q_last,
                                              const KV* block, std::int32_t offset, const char* next, float* out) {
    typename S::Vec sums[Heads][2];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * Heads; ++i) sums[i / 2][i % 2] = S::zero();
    const std::int32_t num_pairs = shape.head_dim / 2;
    const std::size_t stride = shape.block_tokens;
    const KV* keys = block + offset * key_pack<KV>;
    constexpr std::size_t step_bytes = 2 * S::width * sizeof(KV);
    for (std::int32_t i = 0; i < num_pairs; ++i, keys += 2 * stride, next += step_bytes) {
        fetch<step_bytes>(next);
        if constexpr (Dot) {
            const auto x = S::load_words(keys);
            const auto* words = reinterpret_cast<const BFloat*>(q) + i * Heads * 2;
#pragma GCC unroll 4
            for (int h = 0; h < Heads; ++h) sums[h][0] = S::dot(sums[h][0], x, S::set_word(word_at(words + 2 * h)));
        } else {
            typename S::Vec x, y;
            load_key_pair<S>(keys, stride, x, y);
#pragma GCC unroll 4
            for (int h = 0; h < Heads; ++h) {
                sums[h][0] = S::fma(x, S::set(q[(i * Heads + h) * 2]), sums[h][0]);
                sums[h][1] = S::fma(y, S::set(q[(i * Heads + h) * 2 + 1]), sums[h][1]);
            }
        }
    }
    if (shape.head_dim % 2) {
        const auto x = S::load(block + 2 * num_pairs * stride + offset);
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) sums[h][0] = S::fma(x, S::set(q_last[h]), sums[h][0]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) S::store(out + h * chunk_stride, S::add(sums[h][0], sums[h][1]));
}

template <typename S, typename KV, bool Dot, int Heads>
void score_chunk(const KernelShape& shape, const DecodePart<KV>* parts, std::int32_t num_parts, std::int32_t head,
                 DecodeScratch& scratch) {
    for (std::int32_t p = 0; p < num_parts; ++p) {
        const DecodePart<KV>& part = parts[p];
        // A tile may reach past its part: into the block's other rows, whose scores the next part or -infinity replace.
        for (std::int32_t t = 0; t < part.count; t += S::width) {
            const char* next = part.next_keys + t * shape.head_dim * sizeof(KV);
            score_tile<S, KV, Dot, Heads>(shape, scratch.q + head * scratch.padded, scratch.q_last + head, part.keys,
                                          part.offset + t, next,
                                          scratch.weights + head * chunk_stride + part.first + t);
        }
    }
}

// Sums of values of `Heads` query heads in 2 * `Pairs` vectors of columns each, in registers.
template <typename S, int Heads, int Pairs>
struct Columns {
    typename S::Vec sums[Heads][2 * Pairs];

    [[gnu::always_inline]] void load(const float* acc, std::size_t padded) {
#pragma GCC unroll 16
        for (int i = 0; i < Heads * 2 * Pairs; ++i)
            sums[i / (2 * Pairs)][i % (2 * Pairs)] =
                S::load(acc + (i / (2 * Pairs)) * padded + (i % (2 * Pairs)) * S::width);
    }

    [[gnu::always_inline]] void store(float* acc, std::size_t padded) const {
#pragma GCC unroll 16
        for (int i = 0; i < Heads * 2 * Pairs; ++i)
            S::store(acc + (i / (2 * Pairs)) * padded + (i % (2 * Pairs)) * S::width,
                     sums[i / (2 * Pairs)][i % (2 * Pairs)]);
    }

    // `weights` of this token, a row per head. Of a row that ends within the columns, `count` are read.
    template <bool Whole, typename KV>
    [[gnu::always_inline]] void add(const KV* row, std::int32_t count, const float* weights) {
        typename S::Vec weight[Heads];
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) weight[h] = S::set(weights[h * chunk_stride]);
#pragma GCC unroll 4
        for (int i = 0; i < Pairs; ++i) {
            typename S::Vec x, y;
            if constexpr (Whole) {
                load_columns<S>(row + i * 2 * S::width, x, y);
            } else {
                load_some_columns<S>(row, count, x, y);
            }
#pragma GCC unroll 4
            for (int h = 0; h < Heads; ++h) {
                sums[h][2 * i] = S::fma(x, weight[h], sums[h][2 * i]);
                sums[h][2 * i + 1] = S::fma(y, weight[h], sums[h][2 * i + 1]);
            }
        }
    }

    // Two tokens at once, with their weights in bf16.
    [[gnu::always_inline]] void add_two(const BFloat* row, std::int32_t row_stride, const BFloat* weights) {
#pragma GCC unroll 4
        for (int i = 0; i < Pairs; ++i) {
            typename S::Words even, odd;
            S::pair_up(S::load_words(row + i * 2 * S::width), S::load_words(row + row_stride + i * 2 * S::width), even,
                       odd);
#pragma GCC unroll 4
            for (int h = 0; h < Heads; ++h) {
                const auto pair = S::set_word(word_at(weights + h * chunk_stride));
                sums[h][2 * i] = S::dot(sums[h][2 * i], even, pair);
                sums[h][2 * i + 1] = S::dot(sums[h][2 * i + 1], odd, pair);
            }
        }
    }
};

// acc[h, :] += weights[h, t] * values[t, :] over a chunk, from `column` on.
template <typename S, typename KV, bool Dot, int Heads, int Pairs, bool Whole>
[[gnu::always_inline]] inline void add_columns(const KernelShape& shape, const DecodePart<KV>* parts,
                                               std::int32_t num_parts, std::int32_t column, std::int32_t head,
                                               DecodeScratch& scratch) {
    constexpr std::size_t row_bytes = Pairs * 2 * S::width * sizeof(KV);
    float* acc = scratch.acc + head * scratch.padded + column;
    const std::int32_t stride = shape.head_dim;
    Columns<S, Heads, Pairs> columns;
    columns.load(acc, scratch.padded);
    for (std::int32_t p = 0; p < num_parts; ++p) {
        const DecodePart<KV>& part = parts[p];
        const KV* row = part.values + column;
        const std::size_t first_weight = head * chunk_stride + part.first;
        std::int32_t t = 0;
        if constexpr (Dot && Whole) {
            for (; t + 2 <= part.count; t += 2, row += 2 * stride) {
                fetch<row_bytes>(reinterpret_cast<const char*>(row) + part.next_values);
                fetch<row_bytes>(reinterpret_cast<const char*>(row + stride) + part.next_values);
                columns.add_two(row, stride, scratch.pairs + first_weight + t);
            }
        }
        for (; t < part.count; ++t, row += stride) {
            fetch<row_bytes>(reinterpret_cast<const char*>(row) + part.next_values);
            columns.template add<Whole>(row, stride - column, scratch.weights + first_weight + t);
        }
    }
    columns.store(acc, scratch.padded);
}

template <typename S, typename KV, bool Dot, int Heads>
void add_values(const KernelShape& shape, const DecodePart<KV>* parts, std::int32_t num_parts, std::int32_t head,
                DecodeScratch& scratch) {
    constexpr int most = S::accumulators / (2 * Heads);
    std::int32_t column = 0;
    const auto add = [&]<int Pairs>(Constant<Pairs>) __attribute__((always_inline)) {
        for (; column + 2 * Pairs * S::width <= shape.head_dim; column += 2 * Pairs * S::width)
            add_columns<S, KV, Dot, Heads, Pairs, true>(shape, parts, num_parts, column, head, scratch);
    };
    if constexpr (most >= 4) add(Constant<4>{});
    if constexpr (most >= 2) add(Constant<2>{});
    add(Constant<1>{});
    if (column < shape.head_dim)
        add_columns<S, KV, Dot, Heads, 1, false>(shape, parts, num_parts, column, head, scratch);
}

// Splits tokens [position, position + count) into parts; returns how many. `next_head` elements from a head on lies the
// one whose turn comes next in this chunk; 0: the next chunk's turn comes, with the head `first_head` elements back.
template <typename KV>
std::int32_t cut_chunk(const KernelShape& shape, const HeadKv& kv, std::int32_t position, std::int32_t count,
                       std::int32_t end, std::ptrdiff_t next_head, std::ptrdiff_t first_head, DecodePart<KV>* parts) {
    const std::int32_t blocks_ahead = (chunk_tokens + shape.block_tokens - 1) / shape.block_tokens;
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
        }
        part.next_values = next * static_cast<std::ptrdiff_t>(sizeof(KV));
        part.next_keys = reinterpret_cast<const char*>(part.keys) + part.next_values +
                         sizeof(KV) * part.offset * shape.head_dim;
        first += part.count;
    }
    return num_parts;
}

// One KV head's turn in a chunk.
template <typename S, typename KV, bool Dot>
void attend_parts(const KernelShape& shape, const DecodePart<KV>* parts, std::int32_t num_parts, std::int32_t count,
                  DecodeScratch& scratch) {
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        score_chunk<S, KV, Dot, Heads>(shape, parts, num_parts, head, scratch);
    });
    for (std::int32_t g = 0; g < shape.group; ++g) {
        float* weights = scratch.weights + g * chunk_stride;
        weigh<S>(shape, weights, 0, count, scratch.maxima[g], scratch.sums + g * max_lanes,
                 scratch.acc + g * scratch.padded);
        if constexpr (Dot) convert<S>(weights, scratch.pairs + g * chunk_stride, count, 1.0f);
    }
    for_head_tiles(shape.group, [&]<int Heads>(std::int32_t head) {
        add_values<S, KV, Dot, Heads>(shape, parts, num_parts, head, scratch);
    });
}

// Heads take turns within a chunk: what they read of a block lies in one piece.
template <typename S, typename KV, bool Dot>
void attend_tokens(const KernelShape& shape, const HeadKv& kv, std::int32_t num_heads, std::int32_t begin,
                   std::int32_t end, float* memory) {
    const auto head_elements = static_cast<std::ptrdiff_t>(head_block_elements(shape));
    DecodePart<KV> parts[chunk_tokens];
    for (std::int32_t position = begin; position < end; position += chunk_tokens) {
        const std::int32_t count = smaller(chunk_tokens, end - position);
        for (std::int32_t h = 0; h < num_heads; ++h) {
            const HeadKv head{static_cast<KV*>(kv.pool) + h * head_elements, kv.block_table};
            const std::int32_t num_parts = cut_chunk(shape, head, position, count, end,
                                                     h + 1 < num_heads ? head_elements : 0, h * head_elements, parts);
            DecodeScratch scratch(shape, memory, h);
            attend_parts<S, KV, Dot>(shape, parts, num_parts, count, scratch);
        }
    }
    for (std::int32_t h = 0; h < num_heads; ++h) {
        const DecodeScratch scratch(shape, memory, h);
        for (std::int32_t g = 0; g < shape.group; ++g)
            order_columns<S, KV>(scratch.acc + g * scratch.padded, scratch.padded);
    }
}

}  // namespace
}  // namespace neoflex
