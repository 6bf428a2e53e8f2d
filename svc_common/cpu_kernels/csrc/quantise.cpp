#include "quantise.h"

#include <algorithm>
#include <cmath>

#include "half.h"
#include "weight_type.h"

namespace neoflex {

namespace {

constexpr int int8_size = group_depth(WeightType::int8);
constexpr int int4_size = group_depth(WeightType::int4);
constexpr int lanes = 8;  // sums that are made side by side: a compiler may not change their order by itself

template <typename T>
float rounded_to(float value) {
    T rounded;
    store_one(&rounded, value);
    return to_float(rounded);
}

// Adding and taking away 1.5 * 2^23 rounds a number of less than 2^22 to an integer, ties to even, by instructions that
// every processor has for vectors.
float nearest_integer(float x) {
    constexpr float shift = 0x1.8p23f;
    return x + shift - shift;
}

constexpr float half_max = 65504.0f;

// NaN where a weight is not finite, else 0.
float poison(const float* weights, int size) {
    float sum = 0.0f;
    for (int k = 0; k < size; ++k) sum += weights[k] * 0.0f;
    return sum;
}

struct Grid {
    float scale, minimum, error;  // error: sum of squares
    float integers[int4_size];
};

void round_to_grid(const float* weights, float scale, float minimum, Grid& grid) {
    grid.scale = rounded_to<Half>(scale);
    grid.minimum = rounded_to<Half>(minimum);
    const float inverse = grid.scale > 0.0f ? 1.0f / grid.scale : 0.0f;
    float errors[lanes] = {};
    for (int k = 0; k < int4_size; k += lanes)
        for (int i = 0; i < lanes; ++i) {
            const float wanted = nearest_integer((weights[k + i] - grid.minimum) * inverse);
            const float integer = std::min(std::max(wanted, 0.0f), 15.0f);
            const float error = weights[k + i] - (integer * grid.scale + grid.minimum);
            grid.integers[k + i] = integer;
            errors[i] += error * error;
        }
    grid.error = 0.0f;
    for (const float error : errors) grid.error += error;
}

// Steps from the smallest weight to the largest. Fewer than 15: weights that lie on a grid but leave its ends empty, as
// those of files with 4 bits do, find it again. More: the extremes are cut off and the others get a finer grid.
constexpr float int4_steps[] = {15.0f, 14.0f, 13.0f, 12.0f, 11.0f, 10.0f, 9.0f, 8.0f, 15.5f, 16.0f, 16.5f, 17.0f};

}  // namespace

float quantise_int8(const float* weights, std::int8_t* integers) {
    float largest = 0.0f;
    for (int k = 0; k < int8_size; ++k) largest = std::max(largest, std::abs(weights[k]));
    const bool counts = largest >= 1e-30f && largest < INFINITY;
    BFloat scale{};
    if (counts) store_one(&scale, largest / 127.0f);
    // Rounded down, it would not reach the largest weight.
    if (to_float(scale) * 127.0f < largest && counts) ++scale.bits;
    const float inverse = counts ? 1.0f / to_float(scale) : 0.0f;
    const float not_finite = poison(weights, int8_size);
    for (int k = 0; k < int8_size; ++k) {
        const float integer = not_finite == 0.0f ? nearest_integer(weights[k] * inverse) : 0.0f;
        integers[k] = static_cast<std::int8_t>(std::min(std::max(integer, -127.0f), 127.0f));
    }
    return to_float(scale) + not_finite;
}

ScaleAndMinimum quantise_int4(const float* weights, std::uint8_t* integers) {
    const auto [least, most] = std::minmax_element(weights, weights + int4_size);
    const float range = *most - *least;
    const bool representable = poison(weights, int4_size) == 0.0f && range <= half_max && std::abs(*least) <= half_max;
    if (!representable) {
        std::fill_n(integers, int4_size, std::uint8_t{0});
        return {NAN, NAN};
    }
    Grid best, other;
    round_to_grid(weights, range / 15.0f, *least, best);
    for (const float steps : int4_steps) {
        if (best.error == 0.0f) break;
        const float scale = range / steps;
        round_to_grid(weights, scale, *least + std::max(steps - 15.0f, 0.0f) / 2.0f * scale, other);
        if (other.error < best.error) std::swap(best, other);
    }
    for (int k = 0; k < int4_size; ++k) integers[k] = static_cast<std::uint8_t>(best.integers[k]);
    return {best.scale, best.minimum};
}

}  // namespace neoflex
