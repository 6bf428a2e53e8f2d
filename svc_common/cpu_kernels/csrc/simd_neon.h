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
    static Vec load(const std::int8_t* from) { return vcvtq_f32_s32(vreinterpretq_s32_s16(load_int16_firsts(from))); }
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
    static void store(std::int8_t* to, Vec x) {
        const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(x));
        const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
        __builtin_memcpy(to, &bytes, width);
    }
    static void store(std::int16_t* to, Vec x) { vst1_s16(to, vqmovn_s32(vcvtnq_s32_f32(x))); }
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
    static void load_pairs(const std::int8_t* from, Vec& even, Vec& odd) {
        const int32x4_t words = vreinterpretq_s32_s16(load_int16_pairs(from));
        even = vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(words, 16), 16));
        odd = vcvtq_f32_s32(vshrq_n_s32(words, 16));
    }

    using Ints = int32x4_t;
    using Int16Pairs = int16x8_t;
    static Ints no_ints() { return vdupq_n_s32(0); }
    static Int16Pairs load_int16_pairs(const std::int8_t* from) { return vmovl_s8(vld1_s8(from)); }
    // `width` numbers, each the first of a pair; what stands second counts for nothing beside a 0.
    static Int16Pairs load_int16_firsts(const std::int8_t* from) {
        std::int32_t four;
        __builtin_memcpy(&four, from, sizeof four);
        const int16x8_t words = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
        return vreinterpretq_s16_s32(vmovl_s16(vget_low_s16(words)));
    }
    static Int16Pairs set_int16_pair(std::uint32_t pair) { return vreinterpretq_s16_u32(vdupq_n_u32(pair)); }
    // sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in lane i, exact while it fits.
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) {
        const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
        return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(a, b)));
    }
    static Vec to_floats(Ints x) { return vcvtq_f32_s32(x); }

    // even[0], odd[0], even[1], ... in two vectors.
    static void interleave(Vec even, Vec odd, Vec& first, Vec& second) {
        first = vzip1q_f32(even, odd);
        second = vzip2q_f32(even, odd);
    }
};

}  // namespace
}  // namespace neoflex
