// What decode and prefill share: conversions, where a token lies, exponentials, softmax of a chunk of tokens.
//
// Included by kernel_body.h; its rules hold here. Softmax is taken to base 2: factors on scores include log2(e).
#pragma once

#include "half.h"
#include "kernel.h"

namespace neoflex {
namespace {

constexpr float log2_e = 1.44269504088896341f;
constexpr float infinity = __builtin_inff();

template <int Value>
struct Constant {};

template <typename T>
T smaller(T a, T b) {
    return b < a ? b : a;
}

// Calls f with a null pointer of the element type, one that is exchanged.
template <typename F>
void with_float_type(DType dtype, F f) {
    switch (dtype) {
        case DType::fp32: return f(static_cast<float*>(nullptr));
        case DType::fp16: return f(static_cast<Half*>(nullptr));
        case DType::bf16: return f(static_cast<BFloat*>(nullptr));
        case DType::int8: return;  // never: see Shape::check
    }
}

// Any type of KV.
template <typename F>
void with_kv_type(DType dtype, F f) {
    dtype == DType::int8 ? f(static_cast<std::int8_t*>(nullptr)) : with_float_type(dtype, f);
}

template <typename KV>
constexpr bool is_int8 = __is_same(KV, std::int8_t);

// Dimensions of a token's key, and tokens of a dimension's values, that lie together; see layout.h.
template <typename KV>
constexpr std::int32_t key_pack = __is_same(KV, BFloat) || is_int8<KV> ? 2 : 1;
template <typename KV>
constexpr std::int32_t value_pack = is_int8<KV> ? 2 : 1;

// Two neighbours, as the 32 bits that they are.
template <typename T>
std::uint32_t word_at(const T* pair) {
    static_assert(sizeof(T) == 2);
    std::uint32_t word;
    __builtin_memcpy(&word, pair, sizeof word);
    return word;
}

// Converts `count` elements, times `factor`.
template <typename S, typename From, typename To>
void convert(const From* from, To* to, std::int32_t count, float factor) {
    std::int32_t i = 0;
    for (; i + S::width <= count; i += S::width) S::store(to + i, S::mul(S::load(from + i), S::set(factor)));
    for (; i < count; ++i) store_one(to + i, to_float(from[i]) * factor);
}

// Up to 2 * width columns of a row of values, in the order in which they are summed: bf16 by even and odd places.
template <typename S, typename KV>
[[gnu::always_inline]] inline void load_columns(const KV* from, typename S::Vec& a, typename S::Vec& b) {
    if constexpr (__is_same(KV, BFloat)) {
        S::load_pairs(from, a, b);
    } else {
        a = S::load(from);
        b = S::load(from + S::width);
    }
}

template <typename S, typename KV>
[[gnu::always_inline]] inline void load_some_columns(const KV* from, std::int32_t count, typename S::Vec& a,
                                                     typename S::Vec& b) {
    KV whole[2 * S::width] = {};
    for (std::int32_t i = 0; i < count; ++i) whole[i] = from[i];
    load_columns<S>(whole, a, b);
}

// Two dimensions of the keys of `width` tokens. `stride` is the block's number of tokens.
template <typename S, typename KV>
[[gnu::always_inline]] inline void load_key_pair(const KV* from, std::size_t stride, typename S::Vec& first,
                                                 typename S::Vec& second) {
    if constexpr (key_pack<KV> == 2) {
        S::load_pairs(from, first, second);
    } else {
        first = S::load(from);
        second = S::load(from + stride);
    }
}

// Tokens of a chunk that lie in one block.
template <typename KV>
struct Part {
    const KV* keys;    // of the block
    const KV* values;  // of the first of the tokens, or of the one that lies together with it and precedes it
    std::int32_t offset;  // of the first of them in the block
    std::int32_t first;   // its place in the chunk
    std::int32_t count;
    float key_scale;  // both for int8 only
    float value_scale;
};

template <typename KV>
Part<KV> part_at(const KernelShape& shape, const HeadKv& kv, std::int32_t position, std::int32_t end,
                 std::int32_t first) {
    const auto block = static_cast<std::size_t>(kv.block_table[position / shape.block_tokens]);
    const std::int32_t offset = position % shape.block_tokens;
    const KV* keys = static_cast<const KV*>(kv.pool) + block * shape.block_stride;
    const std::int32_t first_row = offset / value_pack<KV> * value_pack<KV>;
    const KV* values = keys + shape.value_offset + static_cast<std::size_t>(first_row) * shape.head_dim;
    Part<KV> part{keys, values, offset, first, smaller(end - position, shape.block_tokens - offset), 1.0f, 1.0f};
    if constexpr (is_int8<KV>) {
        const float* scale = kv.scales + block * shape.scale_stride;
        part.key_scale = scale[0];
        part.value_scale = scale[shape.scale_stride / 2];
    }
    return part;
}

// 2^x for x <= 0; 0 below 2^-126 or so.
template <typename S>
typename S::Vec exp2(typename S::Vec x) {
    // In this order NaN stays NaN.
    x = S::max(S::set(S::flushed_exponent), x);
    const auto whole = S::round(x);
    const auto f = S::sub(x, whole);
    // Series of e^(f ln 2), |f| <= 1/2: the rest is below 2^-26.
    auto y = S::set(1.5252734e-5f);
    y = S::fma(y, f, S::set(1.5403530e-4f));
    y = S::fma(y, f, S::set(1.3333558e-3f));
    y = S::fma(y, f, S::set(9.6181291e-3f));
    y = S::fma(y, f, S::set(5.5504109e-2f));
    y = S::fma(y, f, S::set(2.4022651e-1f));
    y = S::fma(y, f, S::set(6.9314718e-1f));
    y = S::fma(y, f, S::set(1.0f));
    return S::times_power_of_two(y, whole);
}

template <typename S>
float exp2_of(float x) {
    return S::reduce_max(exp2<S>(S::set(x)));
}

// tanh(x / 2 ln 2): of the two powers one is 1, so neither overflows.
template <typename S>
typename S::Vec tanh2(typename S::Vec x) {
    const auto plus = exp2<S>(S::sub(S::zero(), S::max(S::zero(), x)));
    const auto minus = exp2<S>(S::sub(S::zero(), S::max(S::zero(), S::sub(S::zero(), x))));
    return S::div(S::sub(minus, plus), S::add(minus, plus));
}

// Caps scores [end], in place, and returns the largest of [begin, end). All others, up to the end of the last vector,
// become -infinity.
template <typename S>
float cap_scores(const KernelShape& shape, float* scores, std::int32_t begin, std::int32_t end) {
    if (shape.softcap > 0.0f) {
        const auto to_half_cap = S::set(2.0f * shape.softmax_scale * log2_e / shape.softcap);
        const auto cap = S::set(shape.softcap * log2_e);
        for (std::int32_t i = 0; i < end; i += S::width)
            S::store(scores + i, S::mul(tanh2<S>(S::mul(S::load(scores + i), to_half_cap)), cap));
    }
    for (std::int32_t i = 0; i < begin; ++i) scores[i] = -infinity;
    for (std::int32_t i = end; i % S::width != 0; ++i) scores[i] = -infinity;
    auto largest = S::set(-infinity);
    for (std::int32_t i = 0; i < end; i += S::width) largest = S::max(largest, S::load(scores + i));
    return S::reduce_max(largest);
}

// Turns one query's scores of a chunk into weights against the maximum so far, those outside [begin, end) into 0, and
// adds them to `sums` [width]. A new maximum rescales `sums` and `acc` [padded_dim].
template <typename S>
void weigh(const KernelShape& shape, float* scores, std::int32_t begin, std::int32_t end, float& maximum, float* sums,
           float* acc) {
    // Capped scores are scaled already.
    const float factor = shape.softcap > 0.0f ? 1.0f : shape.softmax_scale * log2_e;
    const float largest = cap_scores<S>(shape, scores, begin, end) * factor;
    if (largest > maximum) {
        const auto shrink = S::set(exp2_of<S>(maximum - largest));
        maximum = largest;
        S::store(sums, S::mul(S::load(sums), shrink));
        for (std::size_t d = 0; d < padded_dim(shape); d += S::width)
            S::store(acc + d, S::mul(S::load(acc + d), shrink));
    }
    // Where nothing counts so far, all weights are to be 0 and not 2^(-inf + inf).
    const auto reference = S::set(maximum == -infinity ? 0.0f : -maximum);
    auto sum = S::load(sums);
    for (std::int32_t i = 0; i < end; i += S::width) {
        const auto weights = exp2<S>(S::fma(S::load(scores + i), S::set(factor), reference));
        S::store(scores + i, weights);
        sum = S::add(sum, weights);
    }
    S::store(sums, sum);
}

// An accumulator [padded_dim] in the order of load_columns to numbers in their own order.
template <typename S, typename KV>
void order_columns(float* acc, std::size_t padded) {
    if constexpr (__is_same(KV, BFloat)) {
        for (std::size_t d = 0; d < padded; d += 2 * S::width) {
            typename S::Vec first, second;
            S::interleave(S::load(acc + d), S::load(acc + d + S::width), first, second);
            S::store(acc + d, first);
            S::store(acc + d + S::width, second);
        }
    }
}

}  // namespace
}  // namespace neoflex
