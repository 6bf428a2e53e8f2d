// Numbers of each type in memory, as kernels round them, and how near two of them have to be.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "dtype.h"
#include "half.h"

namespace neoflex {
namespace {

inline float load(DType dtype, const std::byte* from, std::size_t index) {
    switch (dtype) {
        case DType::fp32: return reinterpret_cast<const float*>(from)[index];
        case DType::fp16: return to_float(reinterpret_cast<const Half*>(from)[index]);
        case DType::bf16: return to_float(reinterpret_cast<const BFloat*>(from)[index]);
        case DType::int8: break;
    }
    return to_float(reinterpret_cast<const std::int8_t*>(from)[index]);
}

// Not int8: what such a number counts depends on those beside it.
inline void store(DType dtype, std::byte* to, std::size_t index, float value) {
    if (dtype == DType::fp32) return store_one(reinterpret_cast<float*>(to) + index, value);
    if (dtype == DType::fp16) return store_one(reinterpret_cast<Half*>(to) + index, value);
    store_one(reinterpret_cast<BFloat*>(to) + index, value);
}

inline float rounded(DType dtype, float value) {
    if (dtype == DType::int8) return value;
    std::byte bytes[4];
    store(dtype, bytes, 0, value);
    return load(dtype, bytes, 0);
}

inline const char* name_of(DType dtype) {
    constexpr const char* names[] = {"fp32", "fp16", "bf16", "int8"};
    return names[static_cast<int>(dtype) - 1];
}

inline std::vector<float> noise(std::mt19937& random, std::size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> numbers(count);
    for (float& number : numbers) number = normal(random);
    return numbers;
}

// NaN is near NaN only, and infinity near itself.
inline void check_near(const std::string& what, double got, double want, double tolerance) {
    const bool near = std::isnan(want) ? std::isnan(got) : got == want || std::abs(got - want) <= tolerance;
    if (near) return;
    std::fprintf(stderr, "%s: got %.9g, want %.9g within %.3g\n", what.c_str(), got, want, tolerance);
    std::abort();
}

}  // namespace
}  // namespace neoflex
