// The two ceilings that attention is measured against: memory read and arithmetic, with this instruction set.
//
// Included by kernel_body.h; its rules hold here.
#pragma once

#include "kernel.h"

namespace neoflex {
namespace {

inline std::uint64_t read_words(const std::uint64_t* words, std::size_t num_words) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < num_words; ++i) sum += words[i];
    return sum;
}

template <typename S>
double multiply_add(std::int32_t num_rounds, float* sink) {
    constexpr int chains = 12;  // more than latency times units
    typename S::Vec sums[chains];
    for (int c = 0; c < chains; ++c) sums[c] = S::set(static_cast<float>(c));
    const auto factor = S::set(0.999f), step = S::set(0.001f);
    for (std::int32_t i = 0; i < num_rounds; ++i)
#pragma GCC unroll 12
        for (int c = 0; c < chains; ++c) sums[c] = S::fma(sums[c], factor, step);
    for (int c = 1; c < chains; ++c) sums[0] = S::add(sums[0], sums[c]);
    *sink = S::reduce_add(sums[0]);
    return static_cast<double>(num_rounds) * chains * S::width;
}

}  // namespace
}  // namespace neoflex
