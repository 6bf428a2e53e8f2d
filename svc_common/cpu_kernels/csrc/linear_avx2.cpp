#include "linear_body.h"
#include "simd_avx2.h"

namespace neoflex {
namespace {

struct LinearAvx2 : Avx2 {
    // 12 of 16 registers hold sums.
    static constexpr int tile_rows = 6;
    static constexpr int panel_columns = 16;
    static constexpr bool rounds_rows = false;

    static Vec load_first(const BFloat* pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(pairs), 16)); }
    static Vec load_second(const BFloat* pairs) {
        const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        return _mm256_castsi256_ps(_mm256_and_si256(load_pairs(pairs), high));
    }

  private:
    static __m256i load_pairs(const BFloat* pairs) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    }
};

}  // namespace
}  // namespace neoflex

constinit const neoflex::LinearKernel neoflex::avx2_linear_kernel =
    neoflex::make_linear_kernel<neoflex::LinearAvx2>("avx2");
