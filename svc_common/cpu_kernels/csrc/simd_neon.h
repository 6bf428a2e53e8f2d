// Vectors of 4: Advanced SIMD of AArch64.
#pragma once

#include <arm_neon.h>

#include "half.h"

namespace neoflex {
namespace {

struct Neon {
    using Vec = float32x4_t;
    static constexpr int width = 4;
    static constexpr int accumulators = 16;  // vectors that a loop may keep in registers beside its operands
    static constexpr int product_vectors = 4;  // times rows_together: what fits in registers for products
    static constexpr bool has_bf16_dot = false;
    static constexpr float flushed_exponent = -127.0f;  // times_power_of_two of it is 0

    static Vec zero() { return vdupq_n_f32(0.0f); }
    static Vec set(float x) { return vdupq_n_f32(x); }
    static Vec load(const float* from) { return vld1q_f32(from); }
    static Vec load(const Half* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))); }
    static Vec load(const BFloat* from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&from->bits), 16)); }
    static void store(float* to, Vec x) { vst1q_f32(to, x); }
    static void store(Half* to, Vec x) { vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
    static void store(BFloat* to, Vec x) {
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        const uint32x4_t is_number = vceqq_f32(x, x);
        vst1_u16(&to->bits, vshrn_n_u32(vbslq_u32(is_number, rounded, quiet), 16));
    }
    static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
    static Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
    static Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
    static Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
    static Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
    static Vec round(Vec x) { return vrndnq_f32(x); }
    static Vec times_power_of_two(Vec x, Vec n) {
        const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
        return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    }
    static float reduce_max(Vec x) { return vmaxvq_f32(x); }
    static float reduce_add(Vec x) { return vaddvq_f32(x); }
    // 2 * width numbers: those at even places, those at odd ones.
    static void load_pairs(const BFloat* from, Vec& even, Vec& odd) {
        const uint32x4_t words = vreinterpretq_u32_u16(vld1q_u16(&from->bits));
        even = vreinterpretq_f32_u32(vshlq_n_u32(words, 16));
        odd = vreinterpretq_f32_u32(vandq_u32(words, vdupq_n_u32(0xffff0000u)));
    }
    // even[0], odd[0], even[1], ... in two vectors.
    static void interleave(Vec even, Vec odd, Vec& first, Vec& second) {
        first = vzip1q_f32(even, odd);
        second = vzip2q_f32(even, odd);
    }
};

}  // namespace
}  // namespace neoflex
