// Vectors of 16: AVX-512 F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace neoflex {
namespace {

struct Avx512 {
    using Vec = __m512;
    static constexpr int width = 16;

    static Vec zero() { return _mm512_setzero_ps(); }
    static Vec set(float x) { return _mm512_set1_ps(x); }
    static Vec load(const float* from) { return _mm512_loadu_ps(from); }
    static Vec load(const Half* from) { return _mm512_cvtph_ps(load_16_bit(from)); }
    static Vec load(const BFloat* from) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16_bit(from)), 16));
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
    static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    static Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
    static Vec keep_first(Vec x, int count, float rest) {
        const auto keep = static_cast<__mmask16>((1u << count) - 1u);
        return _mm512_mask_blend_ps(keep, _mm512_set1_ps(rest), x);
    }
    static float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
    static float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
    // Lane i of the result is the sum of rows[i].
    static Vec sum_rows(const Vec* rows) {
        return join_quarters(sum_four(rows), sum_four(rows + 4), sum_four(rows + 8), sum_four(rows + 12));
    }

  private:
    // Four rows to one vector: each quarter holds that quarter's sum of each row.
    static Vec sum_four(const Vec* rows) {
        const Vec ab = add(_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
        const Vec cd = add(_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
        const __m512d ab_pairs = _mm512_castps_pd(ab);
        const __m512d cd_pairs = _mm512_castps_pd(cd);
        return add(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_pairs, cd_pairs)),
                   _mm512_castpd_ps(_mm512_unpackhi_pd(ab_pairs, cd_pairs)));
    }
    // Quarter i of the result is the sum of the i-th argument's quarters.
    static Vec join_quarters(Vec a, Vec b, Vec c, Vec d) {
        const Vec ab = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        const Vec cd = add(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
        return add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }
    static __m256i load_16_bit(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
    static void store_16_bit(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
};

}  // namespace
}  // namespace neoflex
