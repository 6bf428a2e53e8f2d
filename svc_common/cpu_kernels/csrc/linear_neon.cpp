#include "linear_body.h"
#include "simd_neon.h"

namespace neoflex {
namespace {

struct LinearNeon : Neon {
    // 24 of 32 registers hold sums.
    static constexpr int tile_rows = 6;
    static constexpr int integer_tile_rows = 3;  // a sum of pairs takes two registers
    static constexpr int panel_columns = 16;
    static constexpr bool rounds_rows = false;

    static Vec load_first(const BFloat* pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(load_pairs(pairs), 16)); }
    static Vec load_second(const BFloat* pairs) {
        return vreinterpretq_f32_u32(vandq_u32(load_pairs(pairs), vdupq_n_u32(0xffff0000u)));
    }

    // Products of even and odd places of a vector's lower and upper half, added up in pairs only at the end.
    struct Ints {
        int32x4_t low, high;
    };
    static Ints no_ints() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) {
        return {vmlal_s16(sum.low, vget_low_s16(a), vget_low_s16(b)), vmlal_high_s16(sum.high, a, b)};
    }
    static Vec to_floats(Ints x) { return vcvtq_f32_s32(vpaddq_s32(x.low, x.high)); }
    static Int16Pairs load_nibbles(const std::uint8_t* from) { return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(from))); }
    static Int16Pairs lower_nibbles(Int16Pairs words) { return vandq_s16(words, vdupq_n_s16(0x0f)); }
    static Int16Pairs upper_nibbles(Int16Pairs words) {
        return vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s16(words), 4));
    }

  private:
    static uint32x4_t load_pairs(const BFloat* pairs) { return vreinterpretq_u32_u16(vld1q_u16(&pairs->bits)); }
};

}  // namespace
}  // namespace neoflex

constinit const neoflex::LinearKernel neoflex::neon_linear_kernel =
    neoflex::make_linear_kernel<neoflex::LinearNeon>("neon");
