// Vectors of 8: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace neoflex {
namespace {

struct Avx2 {
    using Vec = __m256;
    static constexpr int width = 8;
    static constexpr int accumulators = 8;  // vectors that a loop may keep in registers beside its operands
    static constexpr int product_vectors = 2;  // times rows_together: what fits in registers for products
    static constexpr bool has_bf16_dot = false;
    static constexpr float flushed_exponent = -127.0f;  // times_power_of_two of it is 0

    static Vec zero() { return _mm256_setzero_ps(); }
    static Vec set(float x) { return _mm256_set1_ps(x); }
    static Vec load(const float* from) { return _mm256_loadu_ps(from); }
    static Vec load(const Half* from) { return _mm256_cvtph_ps(load_16_bit(from)); }
    static Vec load(const BFloat* from) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bit(from)), 16));
    }
    static Vec load(const std::int8_t* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
    static void store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
    static void store(Half* to, Vec x) { store_16_bit(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
    static void store(BFloat* to, Vec x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
        const __m256i high = _mm256_srli_epi32(chosen, 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
        store_16_bit(to, _mm256_castsi256_si128(packed));
    }
    static void store(std::int8_t* to, Vec x) {
        const __m128i words = to_int16(x);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
    }
    static void store(std::int16_t* to, Vec x) { store_16_bit(to, to_int16(x)); }
    static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
    static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
    static Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Vec times_power_of_two(Vec x, Vec n) {
        const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    }
    static float reduce_max(Vec x) {
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
    }
    static float reduce_add(Vec x) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    // 2 * width numbers: those at even places, those at odd ones.
    static void load_pairs(const BFloat* from, Vec& even, Vec& odd) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        even = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
        odd = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void load_pairs(const std::int8_t* from, Vec& even, Vec& odd) {
        const __m256i words = load_int16_pairs(from);
        even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16));
        odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16));
    }

    using Ints = __m256i;
    using Int16Pairs = __m256i;
    static Ints no_ints() { return _mm256_setzero_si256(); }
    static Int16Pairs load_int16_pairs(const std::int8_t* from) { return _mm256_cvtepi8_epi16(load_16_bit(from)); }
    // `width` numbers, each the first of a pair; what stands second counts for nothing beside a 0.
    static Int16Pairs load_int16_firsts(const std::int8_t* from) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
    static Int16Pairs set_int16_pair(std::uint32_t pair) { return _mm256_set1_epi32(static_cast<int>(pair)); }
    // sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in lane i, exact while it fits.
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
    static Vec to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }

    // even[0], odd[0], even[1], ... in two vectors.
    static void interleave(Vec even, Vec odd, Vec& first, Vec& second) {
        const Vec low = _mm256_unpacklo_ps(even, odd);
        const Vec high = _mm256_unpackhi_ps(even, odd);
        first = _mm256_permute2f128_ps(low, high, 0x20);
        second = _mm256_permute2f128_ps(low, high, 0x31);
    }

  private:
    static __m128i to_int16(Vec x) {
        const __m256i ints = _mm256_cvtps_epi32(x);
        return _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
    }
    static __m128i load_16_bit(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
    static void store_16_bit(void* to, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(to), x); }
};

}  // namespace
}  // namespace neoflex
