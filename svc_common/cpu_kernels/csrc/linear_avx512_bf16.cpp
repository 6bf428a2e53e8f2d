#include "linear_avx512.h"

namespace neoflex {
namespace {

struct LinearAvx512Bf16 : LinearAvx512 {
    using Pairs = __m512bh;
    static constexpr bool rounds_rows = true;

    static Pairs load_pairs(const BFloat* pairs) { return reinterpret_cast<Pairs>(_mm512_loadu_si512(pairs)); }
    static Pairs set_pair(std::uint32_t bits) {
        return reinterpret_cast<Pairs>(_mm512_set1_epi32(static_cast<int>(bits)));
    }
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) { return (Ints)_mm512_dpwssd_epi32((__m512i)sum, a, b); }
    static Vec add_pair_products(Vec sums, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sums, a, b); }
};

}  // namespace
}  // namespace neoflex

constinit const neoflex::LinearKernel neoflex::avx512_bf16_linear_kernel =
    neoflex::make_linear_kernel<neoflex::LinearAvx512Bf16>("avx512_bf16");
