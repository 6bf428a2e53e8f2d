#include "linear_body.h"
#include "simd_avx2.h"

namespace neoflex {
namespace {

struct LinearAvx2 : Avx2 {
    // 12 of 16 registers hold sums.
    static constexpr int tile_rows = 6;
    static constexpr int integer_tile_rows = 5;
    static constexpr int panel_columns = 16;
    static constexpr bool rounds_rows = false;

    static Vec load_first(const BFloat* pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(pairs), 16)); }
    static Vec load_second(const BFloat* pairs) {
        const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        return _mm256_castsi256_ps(_mm256_and_si256(load_pairs(pairs), high));
    }

    // Not __m256i, see linear_avx512.h.
    using Ints = int __attribute__((vector_size(32)));
    static Ints no_ints() { return Ints{}; }
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) { return sum + (Ints)_mm256_madd_epi16(a, b); }
    static Vec to_floats(Ints x) { return _mm256_cvtepi32_ps((__m256i)x); }
    static Int16Pairs load_nibbles(const std::uint8_t* from) {
        return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static Int16Pairs lower_nibbles(Int16Pairs words) { return _mm256_and_si256(words, _mm256_set1_epi16(0x0f)); }
    static Int16Pairs upper_nibbles(Int16Pairs words) { return _mm256_srli_epi16(words, 4); }

  private:
    static __m256i load_pairs(const BFloat* pairs) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    }
};

}  // namespace
}  // namespace neoflex

constinit const neoflex::LinearKernel neoflex::avx2_linear_kernel =
    neoflex::make_linear_kernel<neoflex::LinearAvx2>("avx2");
