// What the linear kernels need beside the vectors of 16.
#pragma once

#include "linear_body.h"
#include "simd_avx512.h"

namespace neoflex {
namespace {

struct LinearAvx512 : Avx512 {
    // 24 of 32 registers hold sums.
    static constexpr int tile_rows = 12;
    static constexpr int panel_columns = 32;
    static constexpr bool rounds_rows = false;

    static Vec load_first(const BFloat* pairs) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
    }
    static Vec load_second(const BFloat* pairs) {
        const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), high));
    }
};

}  // namespace
}  // namespace neoflex
