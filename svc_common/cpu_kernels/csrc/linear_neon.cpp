#include "linear_body.h"
#include "simd_neon.h"

namespace neoflex {
namespace {

struct LinearNeon : Neon {
    // 24 of 32 registers hold sums.
    static constexpr int tile_rows = 6;
    static constexpr int panel_columns = 16;
    static constexpr bool rounds_rows = false;

    static Vec load_first(const BFloat* pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(load_pairs(pairs), 16)); }
    static Vec load_second(const BFloat* pairs) {
        return vreinterpretq_f32_u32(vandq_u32(load_pairs(pairs), vdupq_n_u32(0xffff0000u)));
    }

  private:
    static uint32x4_t load_pairs(const BFloat* pairs) { return vreinterpretq_u32_u16(vld1q_u16(&pairs->bits)); }
};

}  // namespace
}  // namespace neoflex

constinit const neoflex::LinearKernel neoflex::neon_linear_kernel =
    neoflex::make_linear_kernel<neoflex::LinearNeon>("neon");
