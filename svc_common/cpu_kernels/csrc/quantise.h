// Rounds a group of weights to integers with one scale.
#pragma once

#include <cstdint>

namespace neoflex {

// integers [group_depth] from -127 to 127 of `weights` [group_depth]; weights are integer * the scale returned, a bf16
// number: the least that reaches the largest weight, so that each is off by at most half of it. Smaller than 1e-30
// all: zero. Where a weight is not finite the scale is NaN.
float quantise_int8(const float* weights, std::int8_t* integers);

struct ScaleAndMinimum {
    float scale;
    float minimum;
};

// integers [group_depth] from 0 to 15 of `weights` [group_depth]; weights are integer * scale + minimum, both fp16
// numbers: of those tried, the ones with the least sum of squared errors. What GGUF has
// in Q4_0 or Q4_1 stays as it is. Where a weight is not finite, or it or the range is beyond fp16, these are NaN.
ScaleAndMinimum quantise_int4(const float* weights, std::uint8_t* integers);

}  // namespace neoflex
