// Vectors of one element: the plain reading of the kernel, and its fallback.
#pragma once

#include "half.h"

namespace neoflex {
namespace {

struct Scalar {
    using Vec = float;
    static constexpr int width = 1;
    static constexpr int accumulators = 8;
    static constexpr int product_vectors = 2;  // times rows_together: what fits in registers for products
    static constexpr bool has_bf16_dot = false;
    static constexpr float flushed_exponent = -127.0f;  // times_power_of_two of it is 0

    static Vec zero() { return 0.0f; }
    static Vec set(float x) { return x; }
    template <typename T>
    static Vec load(const T* from) {
        return to_float(*from);
    }
    template <typename T>
    static void store(T* to, Vec x) {
        store_one(to, x);
    }
    static Vec add(Vec a, Vec b) { return a + b; }
    static Vec sub(Vec a, Vec b) { return a - b; }
    static Vec mul(Vec a, Vec b) { return a * b; }
    static Vec div(Vec a, Vec b) { return a / b; }
    static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
    static Vec max(Vec a, Vec b) { return a > b ? a : b; }
    static Vec round(Vec x) { return __builtin_rintf(x); }
    static Vec times_power_of_two(Vec x, Vec n) {
        return x * from_bits(static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127) << 23);
    }
    static float reduce_max(Vec x) { return x; }
    static float reduce_add(Vec x) { return x; }
    static void load_pairs(const BFloat* from, Vec& even, Vec& odd) {
        even = to_float(from[0]);
        odd = to_float(from[1]);
    }
    static void load_pairs(const std::int8_t* from, Vec& even, Vec& odd) {
        even = from[0];
        odd = from[1];
    }

    using Ints = std::int32_t;
    using Int16Pairs = std::uint32_t;
    static Ints no_ints() { return 0; }
    static Int16Pairs load_int16_pairs(const std::int8_t* from) { return int16_pair(from[0], from[1]); }
    static Int16Pairs load_int16_firsts(const std::int8_t* from) { return int16_pair(from[0], 0); }
    static Int16Pairs set_int16_pair(std::uint32_t pair) { return pair; }
    static Ints dot(Ints sum, Int16Pairs a, Int16Pairs b) {
        return sum + static_cast<std::int16_t>(a) * static_cast<std::int16_t>(b) +
               static_cast<std::int16_t>(a >> 16) * static_cast<std::int16_t>(b >> 16);
    }
    static Vec to_floats(Ints x) { return static_cast<float>(x); }

    static void interleave(Vec even, Vec odd, Vec& first, Vec& second) {
        first = even;
        second = odd;
    }

  private:
    static Int16Pairs int16_pair(std::int16_t first, std::int16_t second) {
        return static_cast<std::uint16_t>(first) | static_cast<std::uint32_t>(static_cast<std::uint16_t>(second)) << 16;
    }
};

}  // namespace
}  // namespace neoflex
