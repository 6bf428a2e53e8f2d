// Tokens into and out of one KV head's part of a block.
//
// Included by kernel_body.h; its rules hold here. In int8 a number x is stored as round(x / scale), |x| <= 127 * scale,
// where a block's scale is its largest magnitude / 127, for K and for V. A token that exceeds it makes the earlier ones'
// numbers be rounded again, to the new scale. So a number is off by at most half a scale, and by half of each scale
// that the block gets after it was written: (1 + n) / 2 of the block's last scale at most, n being how often it grew
// since. Tokens that come together are rounded together, once. Scales below 2^-126 are 0, and so are the block's numbers
// then. A number that is not finite makes its block's scale, and with it what is computed from it, NaN.
#pragma once

#include "kernel_math.h"

namespace neoflex {
namespace {

constexpr std::uint32_t infinity_bits = 0x7f800000u;
constexpr float largest_int8 = 127.0f;
constexpr float smallest_scale = 0x1p-126f;

// The largest magnitude in a row, as fp32's bits: their order is the numbers' own, and NaN is the largest.
template <typename X>
std::uint32_t largest_magnitude(const X* row, std::int32_t count) {
    if constexpr (sizeof(X) == sizeof(float)) {
        std::uint32_t largest = 0;
        for (std::int32_t i = 0; i < count; ++i) {
            const std::uint32_t bits = to_bits(row[i]) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        return largest;
    } else {
        std::uint16_t largest = 0;
        for (std::int32_t i = 0; i < count; ++i) {
            const auto bits = static_cast<std::uint16_t>(row[i].bits & 0x7fffu);
            largest = bits > largest ? bits : largest;
        }
        return to_bits(to_float(X{largest}));
    }
}

// Of numbers up to this magnitude, as integers up to `most`.
inline float scale_for(std::uint32_t largest, float most) {
    if (largest >= infinity_bits) return __builtin_nanf("");
    const float scale = from_bits(largest) / most;
    return scale < smallest_scale ? 0.0f : scale;
}

// What numbers are multiplied by to be stored; 0 where all are to be 0.
inline float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

template <typename S, typename X, typename Int>
void quantise_row(const X* row, Int* to, std::int32_t count, float inverse) {
    if (inverse > 0.0f) return convert<S>(row, to, count, inverse);
    for (std::int32_t i = 0; i < count; ++i) to[i] = 0;
}

// Sets the scale so that numbers up to this magnitude fit beside the block's earlier ones [count].
template <typename S>
void fit_scale(std::int8_t* earlier, std::size_t count, bool is_first, std::uint32_t largest, float& scale) {
    const float wanted = scale_for(largest, largest_int8);
    if (is_first) {
        scale = wanted;
    } else if (wanted > scale) {
        // The rows of tokens to come are rounded along; nobody reads them.
        convert<S>(earlier, earlier, static_cast<std::int32_t>(count), scale / wanted);
        scale = wanted;
    } else if (wanted != wanted) {
        scale = wanted;
    }
}

template <typename KV>
void put_key(const KernelShape& shape, KV* block, std::int32_t offset, const KV* key) {
    const std::size_t stride = shape.block_tokens;
    constexpr std::int32_t pack = key_pack<KV>;
    std::int32_t d = 0;
    for (; d + pack <= shape.head_dim; d += pack)
        for (std::int32_t i = 0; i < pack; ++i) block[d * stride + offset * pack + i] = key[d + i];
    if (d < shape.head_dim) block[d * stride + offset] = key[d];
}

// Where a token's values in int8 lie, and how far they are from one another.
struct ValueRow {
    ValueRow(const KernelShape& shape, std::int32_t offset) {
        const bool is_paired = offset / 2 * 2 + 1 < shape.block_tokens;
        first = static_cast<std::size_t>(offset / 2 * 2) * shape.head_dim + (is_paired ? offset % 2 : 0);
        step = is_paired ? 2 : 1;
    }

    std::size_t first;
    std::size_t step;
};

template <typename S, typename X>
void write_int8(const KernelShape& shape, const HeadKv& kv, const BlockRows& rows, const X* k, const X* v) {
    std::int8_t* keys = static_cast<std::int8_t*>(kv.pool) + static_cast<std::size_t>(rows.block) * shape.block_stride;
    std::int8_t* values = keys + shape.value_offset;
    float& key_scale = kv.scales[static_cast<std::size_t>(rows.block) * shape.scale_stride];
    float& value_scale = (&key_scale)[shape.scale_stride / 2];
    std::uint32_t largest_key = 0, largest_value = 0;
    for (std::int32_t t = 0; t < rows.num_tokens; ++t) {
        const std::uint32_t key = largest_magnitude(k + t * rows.stride, shape.head_dim);
        const std::uint32_t value = largest_magnitude(v + t * rows.stride, shape.head_dim);
        largest_key = key > largest_key ? key : largest_key;
        largest_value = value > largest_value ? value : largest_value;
    }
    const bool is_first = rows.offset == 0;
    fit_scale<S>(keys, head_block_elements(shape), is_first, largest_key, key_scale);
    fit_scale<S>(values, head_block_elements(shape), is_first, largest_value, value_scale);
    std::int8_t row[256];
    for (std::int32_t t = 0; t < rows.num_tokens; ++t) {
        quantise_row<S>(k + t * rows.stride, row, shape.head_dim, inverse_of(key_scale));
        put_key(shape, keys, rows.offset + t, row);
        quantise_row<S>(v + t * rows.stride, row, shape.head_dim, inverse_of(value_scale));
        const ValueRow at(shape, rows.offset + t);
        for (std::int32_t d = 0; d < shape.head_dim; ++d) values[at.first + d * at.step] = row[d];
    }
}

template <typename S, typename KV, typename X>
void write_floats(const KernelShape& shape, const HeadKv& kv, const BlockRows& rows, const X* k, const X* v) {
    KV* block = static_cast<KV*>(kv.pool) + static_cast<std::size_t>(rows.block) * shape.block_stride;
    for (std::int32_t t = 0; t < rows.num_tokens; ++t) {
        const std::int32_t offset = rows.offset + t;
        KV key[256];
        convert<S>(k + t * rows.stride, key, shape.head_dim, 1.0f);
        put_key(shape, block, offset, key);
        convert<S>(v + t * rows.stride, block + shape.value_offset + static_cast<std::size_t>(offset) * shape.head_dim,
                   shape.head_dim, 1.0f);
    }
}

template <typename S>
void write(const KernelShape& shape, const HeadKv& kv, const BlockRows& rows) {
    with_float_type(shape.exchange_dtype, [&]<typename X>(X*) {
        const X* k = static_cast<const X*>(rows.k);
        const X* v = static_cast<const X*>(rows.v);
        with_kv_type(shape.kv_dtype, [&]<typename KV>(KV*) {
            if constexpr (is_int8<KV>) {
                write_int8<S>(shape, kv, rows, k, v);
            } else {
                write_floats<S, KV>(shape, kv, rows, k, v);
            }
        });
    });
}

// Values in int8 of tokens [offset, offset + count) of a block, from the pair on that the first of them is in, to rows
// of `stride` floats.
template <typename S>
void read_values(const KernelShape& shape, const std::int8_t* values, std::int32_t offset, std::int32_t count,
                 float scale, std::size_t stride, float* to) {
    const std::int32_t first_row = offset / 2 * 2;
    for (std::int32_t row = first_row; row < offset + count; row += 2, values += 2 * shape.head_dim) {
        float* first = row >= offset ? to + (row - offset) * stride : nullptr;
        if (row + 1 == shape.block_tokens) return convert<S>(values, first, shape.head_dim, scale);
        float* second = row + 1 < offset + count ? to + (row + 1 - offset) * stride : nullptr;
        std::int32_t d = 0;
        for (; d + S::width <= shape.head_dim; d += S::width) {
            typename S::Vec a, b;
            S::load_pairs(values + 2 * d, a, b);
            if (first != nullptr) S::store(first + d, S::mul(a, S::set(scale)));
            if (second != nullptr) S::store(second + d, S::mul(b, S::set(scale)));
        }
        for (; d < shape.head_dim; ++d) {
            if (first != nullptr) first[d] = to_float(values[2 * d]) * scale;
            if (second != nullptr) second[d] = to_float(values[2 * d + 1]) * scale;
        }
    }
}

template <typename S>
void read_tokens(const KernelShape& shape, const HeadKv& kv, std::int32_t block, std::int32_t num_tokens, float* k, float* v) {
    with_kv_type(shape.kv_dtype, [&]<typename KV>(KV*) {
        const HeadKv one{kv.pool, kv.scales, &block};
        const Part<KV> part = part_at<KV>(shape, one, 0, num_tokens, 0);
        const std::size_t stride = shape.block_tokens;
        constexpr std::int32_t pack = key_pack<KV>;
        const std::int32_t packed = shape.head_dim / pack * pack;
        for (std::int32_t t = 0; t < num_tokens; ++t)
            for (std::int32_t d = 0; d < shape.head_dim; ++d) {
                const std::size_t place = d < packed ? d / pack * pack * stride + t * pack + d % pack : d * stride + t;
                k[t * shape.head_dim + d] = to_float(part.keys[place]) * part.key_scale;
            }
        if constexpr (is_int8<KV>) {
            read_values<S>(shape, part.values, 0, num_tokens, part.value_scale, shape.head_dim, v);
        } else {
            convert<S>(part.values, v, num_tokens * shape.head_dim, 1.0f);
        }
    });
}

}  // namespace
}  // namespace neoflex
