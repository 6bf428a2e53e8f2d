// Numbers of 16 and 8 bits, one at a time: for row tails and for the scalar kernel.
#pragma once

#include <cstdint>

namespace neoflex {
namespace {

struct Half {
    std::uint16_t bits;
};

struct BFloat {
    std::uint16_t bits;
};

inline float from_bits(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline std::uint32_t to_bits(float value) { return __builtin_bit_cast(std::uint32_t, value); }

inline float to_float(float value) { return value; }

inline float to_float(BFloat value) { return from_bits(static_cast<std::uint32_t>(value.bits) << 16); }

inline float to_float(Half value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
    const std::uint32_t magnitude = value.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x0400u) return from_bits(sign | ((magnitude << 13) + (112u << 23)));
    // Subnormal or zero: an integer multiple of 2^-24.
    return from_bits(sign | to_bits(static_cast<float>(magnitude) * 0x1p-24f));
}

inline float to_float(std::int8_t value) { return value; }

inline void store_one(float* to, float value) { *to = value; }

// Rounds to nearest, ties to even, what the type holds; NaN becomes 0.
inline void store_one(std::int8_t* to, float value) {
    *to = static_cast<std::int8_t>(value == value ? __builtin_rintf(value) : 0.0f);
}

inline void store_one(std::int16_t* to, float value) {
    *to = static_cast<std::int16_t>(value == value ? __builtin_rintf(value) : 0.0f);
}

// Rounds to nearest, ties to even.
inline void store_one(BFloat* to, float value) {
    const std::uint32_t bits = to_bits(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    to->bits = static_cast<std::uint16_t>(is_nan ? (bits >> 16 | 0x40u) : rounded >> 16);
}

// Rounds to nearest, ties to even; too large becomes infinite.
inline void store_one(Half* to, float value) {
    const std::uint32_t bits = to_bits(value);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {
        // Adding 0.5 leaves the number of units of 2^-24, rounded, in the lowest bits.
        half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    }
    to->bits = static_cast<std::uint16_t>(sign | half);
}

}  // namespace
}  // namespace neoflex
