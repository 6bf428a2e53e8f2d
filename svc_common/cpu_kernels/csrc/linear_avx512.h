// What the linear kernels need beside the vectors of 16.
#pragma once

#include "linear_body.h"
#include "simd_avx512.h"

namespace neoflex {
namespace {

struct LinearAvx512 : Avx512 {
    // 24 of 32 registers hold sums.
    static constexpr int tile_rows = 12;
    static constexpr int integer_tile_rows = 12;
    static constexpr int panel_columns = 32;
    static constexpr bool rounds_rows = false;

    static Vec load_first(const BFloat* pairs) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
    }
    static Vec load_second(const BFloat* pairs) {
        const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), high));
    }

    // Not __m512i: GCC then writes sums to memory at each addition, because it takes them for another type than these
    // instructions add up.
    using Ints = int __attribute__((vector_size(64)));
    static Ints no_ints() { return Ints{}; }
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) { return sum + (Ints)_mm512_madd_epi16(a, b); }
    static Vec to_floats(Ints x) { return _mm512_cvtepi32_ps((__m512i)x); }
    static Int16Pairs load_nibbles(const std::uint8_t* from) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static Int16Pairs lower_nibbles(Int16Pairs words) { return _mm512_and_si512(words, _mm512_set1_epi16(0x0f)); }
    static Int16Pairs upper_nibbles(Int16Pairs words) { return _mm512_srli_epi16(words, 4); }
};

}  // namespace
}  // namespace neoflex
