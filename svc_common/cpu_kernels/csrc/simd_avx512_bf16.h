// AVX-512 with its products of bf16 pairs and of int16 pairs.
#pragma once

#include "simd_avx512.h"

namespace neoflex {
namespace {

struct Avx512BFloat : Avx512 {
    using Words = __m512i;  // 16 pairs of bf16
    static constexpr bool has_bf16_dot = true;

    static Words set_word(std::uint32_t pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }
    static Words load_words(const BFloat* from) { return Avx512::load_words(from); }
    static Words no_words() { return _mm512_setzero_si512(); }
    // Of two rows: pairs of what stands at even places, and at odd ones.
    static void pair_up(Words first, Words second, Words& even, Words& odd) {
        const __mmask32 upper = 0xaaaaaaaau;
        even = _mm512_mask_blend_epi16(upper, first, _mm512_slli_epi32(second, 16));
        odd = _mm512_mask_blend_epi16(upper, _mm512_srli_epi32(first, 16), second);
    }
    // sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in lane i; denormal numbers count as 0.
    static Vec dot(Vec sum, Words a, Words b) {
        return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b));
    }
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) { return _mm512_dpwssd_epi32(sum, a, b); }
};

}  // namespace
}  // namespace neoflex
