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

// Weights as integer * scale + minimum, and the sum of the squares of what that is off by.
struct Grid {
    float scale, minimum, error;
    float integers[int4_size];
};

void round_to_grid(const float* weights, float scale, float minimum, Grid& grid) {
    grid.scale = rounded_to<Half>(scale);
    grid.minimum = rounded_to<Half>(minimum);
    const float inverse = grid.scale != 0.0f ? 1.0f / grid.scale : 0.0f;
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

void keep_better(const float* weights, float scale, float minimum, Grid& best) {
    Grid other;
    round_to_grid(weights, scale, minimum, other);
    if (other.error < best.error) best = other;
}

// The scale and minimum with the least squared error for the integers of `from`, and what rounding to them gives.
void fit(const float* weights, const Grid& from, Grid& best) {
    float n = int4_size, x = 0.0f, y = 0.0f, xx = 0.0f, xy = 0.0f;
    for (int k = 0; k < int4_size; ++k) {
        const float integer = from.integers[k];
        x += integer;
        y += weights[k];
        xx += integer * integer;
        xy += integer * weights[k];
    }
    const float spread = n * xx - x * x;
    if (spread <= 0.0f) return;
    const float scale = (n * xy - x * y) / spread;
    keep_better(weights, scale, (y - scale * x) / n, best);
}

// Whether some of the weights lie on the grid, but for what rounding its scale takes.
bool may_lie_on(const float* weights, float scale, float minimum) {
    const float inverse = 1.0f / scale;
    float farthest = 0.0f;
    for (int k = 0; k < lanes; ++k) {
        const float place = (weights[k] - minimum) * inverse;
        farthest = std::max(farthest, std::abs(place - nearest_integer(place)));
    }
    return farthest < 0.01f;
}

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
    Grid best;
    round_to_grid(weights, range / 15.0f, *least, best);
    // Weights of a file with 4 bits lie on a grid already: from -8 to 7 times a scale of either sign, or another whose
    // ends may be empty.
    const float end = -*least > *most ? *least : *most;
    if (best.error > 0.0f) keep_better(weights, end / -8.0f, end, best);
    for (float steps = 14.0f; steps >= 8.0f && best.error > 0.0f; --steps)
        if (may_lie_on(weights, range / steps, *least)) keep_better(weights, range / steps, *least, best);
    if (best.error > 0.0f) {
        fit(weights, Grid(best), best);
        // The ends cut off by half a step, and a finer scale for the others.
        Grid cut;
        const float scale = range / 16.0f;
        round_to_grid(weights, scale, *least + scale / 2.0f, cut);
        fit(weights, cut, best);
    }
    for (int k = 0; k < int4_size; ++k) integers[k] = static_cast<std::uint8_t>(best.integers[k]);
    return {best.scale, best.minimum};
}

}  // namespace neoflex
