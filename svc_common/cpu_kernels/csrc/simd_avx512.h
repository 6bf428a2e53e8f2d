// Vectors of 16: AVX-512 F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace neoflex {
namespace {

struct Avx512 {
    using Vec = __m512;
    static constexpr int width = 16;
    static constexpr int accumulators = 16;  // vectors that a loop may keep in registers beside its operands
    static constexpr int product_vectors = 4;  // times rows_together: what fits in registers for products
    static constexpr bool has_bf16_dot = false;
    static constexpr float flushed_exponent = -151.0f;  // times_power_of_two of it is 0

    static Vec zero() { return _mm512_setzero_ps(); }
    static Vec set(float x) { return _mm512_set1_ps(x); }
    static Vec load(const float* from) { return _mm512_loadu_ps(from); }
    static Vec load(const Half* from) { return _mm512_cvtph_ps(load_16_bit(from)); }
    static Vec load(const BFloat* from) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16_bit(from)), 16));
    }
    static Vec load(const std::int8_t* from) {
        return _mm512_cvtepi32_ps(load_int16_firsts(from));
    }
    static void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
    static void store(Half* to, Vec x) { store_16_bit(to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
    static void store(BFloat* to, Vec x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i chosen = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
        store_16_bit(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
    }
    static void store(std::int8_t* to, Vec x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
    }
    static void store(std::int16_t* to, Vec x) { store_16_bit(to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x))); }
    static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    static Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
    static float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
    static float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
    // 2 * width numbers: those at even places, those at odd ones.
    static void load_pairs(const BFloat* from, Vec& even, Vec& odd) {
        const __m512i words = load_words(from);
        even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        odd = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void load_pairs(const std::int8_t* from, Vec& even, Vec& odd) {
        const __m512i words = load_int16_pairs(from);
        even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
        odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
    }

    using Ints = __m512i;
    using Int16Pairs = __m512i;
    static Ints no_ints() { return _mm512_setzero_si512(); }
    static Int16Pairs load_int16_pairs(const std::int8_t* from) { return _mm512_cvtepi8_epi16(load_16_bit(from)); }
    // `width` numbers, each the first of a pair; what stands second counts for nothing beside a 0.
    static Int16Pairs load_int16_firsts(const std::int8_t* from) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static Int16Pairs set_int16_pair(std::uint32_t pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }
    // sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in lane i, exact while it fits.
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
    static Vec to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }

    // even[0], odd[0], even[1], ... in two vectors.
    static void interleave(Vec even, Vec odd, Vec& first, Vec& second) {
        const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        first = _mm512_permutex2var_ps(even, low, odd);
        second = _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd);
    }

  protected:
    static __m512i load_words(const void* from) { return _mm512_loadu_si512(from); }

  private:
    static __m256i load_16_bit(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
    static void store_16_bit(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
};

}  // namespace
}  // namespace neoflex
