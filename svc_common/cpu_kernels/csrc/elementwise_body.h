// What stands between the matrix products: bias, residual, gate, norms, rotation. One body per instruction set.
//
// Included by linear_body.h; the same rules hold here.
#pragma once

#include "half.h"
#include "linear_kernel.h"

namespace neoflex {
namespace {

// x / (1 + e^-z); the exponent is kept where a power of two stays normal.
template <typename S>
[[gnu::always_inline]] inline typename S::Vec times_sigmoid(typename S::Vec x, typename S::Vec z) {
    const auto limit = S::set(-126.0f);
    // In this order NaN stays NaN.
    auto exponent = S::max(limit, S::mul(z, S::set(1.44269504088896341f)));
    exponent = S::max(limit, S::sub(S::zero(), exponent));
    const auto whole = S::round(exponent);
    const auto f = S::sub(exponent, whole);
    // Series of 2^f, |f| <= 1/2: the rest is below 2^-26.
    auto power = S::set(1.5252734e-5f);
    power = S::fma(power, f, S::set(1.5403530e-4f));
    power = S::fma(power, f, S::set(1.3333558e-3f));
    power = S::fma(power, f, S::set(9.6181291e-3f));
    power = S::fma(power, f, S::set(5.5504109e-2f));
    power = S::fma(power, f, S::set(2.4022651e-1f));
    power = S::fma(power, f, S::set(6.9314718e-1f));
    power = S::fma(power, f, S::set(1.0f));
    return S::div(x, S::add(S::set(1.0f), S::times_power_of_two(power, whole)));
}

template <typename S>
struct Silu {
    [[gnu::always_inline]] static typename S::Vec of(typename S::Vec x) { return times_sigmoid<S>(x, x); }
};

// x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3) (Hendrycks and Gimpel, GELU, 2016).
template <typename S>
struct GeluTanh {
    [[gnu::always_inline]] static typename S::Vec of(typename S::Vec x) {
        const auto inner = S::fma(S::mul(x, x), S::set(2.0f * 0.79788456f * 0.044715f), S::set(2.0f * 0.79788456f));
        return times_sigmoid<S>(x, S::mul(x, inner));
    }
};

template <typename S>
void store(const float* sums, std::int32_t num_rows, std::int32_t num_columns, const float* bias,
           const float* residual, float* out, std::size_t out_stride) {
    for (std::int32_t r = 0; r < num_rows; ++r, sums += S::panel_columns) {
        const std::size_t row = r * out_stride;
        std::int32_t c = 0;
        for (; c + S::width <= num_columns; c += S::width) {
            auto x = S::load(sums + c);
            if (bias != nullptr) x = S::add(x, S::load(bias + c));
            if (residual != nullptr) x = S::add(x, S::load(residual + row + c));
            S::store(out + row + c, x);
        }
        for (; c < num_columns; ++c) {
            float x = sums[c];
            if (bias != nullptr) x += bias[c];
            if (residual != nullptr) x += residual[row + c];
            out[row + c] = x;
        }
    }
}

template <typename S, typename Gate>
void store_gated(const float* sums, std::int32_t num_rows, std::int32_t num_columns, const float* bias, float* out,
                 std::size_t out_stride) {
    constexpr std::int32_t half = S::panel_columns / 2;
    for (std::int32_t r = 0; r < num_rows; ++r, sums += S::panel_columns) {
        float* row = out + r * out_stride;
        float last[half];
        float* gated = num_columns == half ? row : last;
        for (std::int32_t c = 0; c < half; c += S::width) {
            auto gate = S::load(sums + c);
            auto up = S::load(sums + half + c);
            if (bias != nullptr) {
                gate = S::add(gate, S::load(bias + c));
                up = S::add(up, S::load(bias + half + c));
            }
            S::store(gated + c, S::mul(Gate::of(gate), up));
        }
        if (gated == last)
            for (std::int32_t c = 0; c < num_columns; ++c) row[c] = last[c];
    }
}

template <typename S>
void store_relu(const float* sums, std::int32_t num_rows, std::int32_t num_columns, const float* bias, float* out,
                std::size_t out_stride) {
    store<S>(sums, num_rows, num_columns, bias, nullptr, out, out_stride);
    for (std::int32_t r = 0; r < num_rows; ++r, out += out_stride)
        for (std::int32_t c = 0; c < num_columns; ++c)
            if (out[c] < 0.0f) out[c] = 0.0f;  // NaN stays.
}

template <typename S>
void store_activated(Activation activation, const float* sums, std::int32_t num_rows, std::int32_t num_columns,
                     const float* bias, float* out, std::size_t out_stride) {
    switch (activation) {
        case Activation::silu_gated:
            return store_gated<S, Silu<S>>(sums, num_rows, num_columns, bias, out, out_stride);
        case Activation::gelu_tanh_gated:
            return store_gated<S, GeluTanh<S>>(sums, num_rows, num_columns, bias, out, out_stride);
        default: return store_relu<S>(sums, num_rows, num_columns, bias, out, out_stride);
    }
}

// Factor of a row's elements. The same whatever stands beside the row.
template <typename S>
float inverse_rms(const float* row, std::int32_t width, float eps) {
    auto even = S::zero();
    auto odd = S::zero();
    std::int32_t i = 0;
    for (; i + 2 * S::width <= width; i += 2 * S::width) {
        const auto a = S::load(row + i);
        const auto b = S::load(row + i + S::width);
        even = S::fma(a, a, even);
        odd = S::fma(b, b, odd);
    }
    float squares = S::reduce_add(S::add(even, odd));
    for (; i < width; ++i) squares += row[i] * row[i];
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + eps);
}

template <typename S>
void normalise_row(const float* row, std::int32_t width, const float* weight, float eps, float* out) {
    const float factor = inverse_rms<S>(row, width, eps);
    std::int32_t i = 0;
    for (; i + S::width <= width; i += S::width)
        S::store(out + i, S::mul(S::mul(S::load(row + i), S::set(factor)), S::load(weight + i)));
    for (; i < width; ++i) out[i] = row[i] * factor * weight[i];
}

template <typename S>
float sum_of(const float* row, std::int32_t width) {
    auto sums = S::zero();
    std::int32_t i = 0;
    for (; i + S::width <= width; i += S::width) sums = S::add(sums, S::load(row + i));
    float sum = S::reduce_add(sums);
    for (; i < width; ++i) sum += row[i];
    return sum;
}

template <typename S>
float squares_around(const float* row, std::int32_t width, float mean) {
    auto sums = S::zero();
    std::int32_t i = 0;
    for (; i + S::width <= width; i += S::width) {
        const auto x = S::sub(S::load(row + i), S::set(mean));
        sums = S::fma(x, x, sums);
    }
    float sum = S::reduce_add(sums);
    for (; i < width; ++i) sum += (row[i] - mean) * (row[i] - mean);
    return sum;
}

template <typename S>
void centre_row(const Norm& norm, const float* row, std::int32_t width, float* out) {
    const float mean = sum_of<S>(row, width) / static_cast<float>(width);
    const float variance = squares_around<S>(row, width, mean) / static_cast<float>(width);
    const float factor = 1.0f / __builtin_sqrtf(variance + norm.eps);
    std::int32_t i = 0;
    for (; i + S::width <= width; i += S::width) {
        const auto x = S::mul(S::sub(S::load(row + i), S::set(mean)), S::set(factor));
        S::store(out + i, S::fma(x, S::load(norm.weight + i), S::load(norm.bias + i)));
    }
    for (; i < width; ++i) out[i] = (row[i] - mean) * factor * norm.weight[i] + norm.bias[i];
}

template <typename S>
void add_normalised_row(const Norm& norm, const float* row, std::int32_t width, const float* residual, float* out) {
    const float factor = inverse_rms<S>(row, width, norm.eps);
    std::int32_t i = 0;
    for (; i + S::width <= width; i += S::width) {
        const auto x = S::mul(S::mul(S::load(row + i), S::set(factor)), S::load(norm.weight + i));
        S::store(out + i, S::add(x, S::load(residual + i)));
    }
    for (; i < width; ++i) out[i] = row[i] * factor * norm.weight[i] + residual[i];
}

template <typename S>
void normalise(const Norm& norm, const float* rows, std::int32_t num_rows, std::int32_t width, const float* residual,
               float* out) {
    for (std::int32_t r = 0; r < num_rows; ++r, rows += width, out += width) {
        if (residual != nullptr) {
            add_normalised_row<S>(norm, rows, width, residual, out);
            residual += width;
        } else if (norm.centred) {
            centre_row<S>(norm, rows, width, out);
        } else {
            normalise_row<S>(rows, width, norm.weight, norm.eps, out);
        }
    }
}

template <typename S>
void rotate_head(float* head, std::int32_t half, const float* cos, const float* sin) {
    std::int32_t i = 0;
    for (; i + S::width <= half; i += S::width) {
        const auto c = S::load(cos + i);
        const auto s = S::load(sin + i);
        const auto first = S::load(head + i);
        const auto second = S::load(head + half + i);
        S::store(head + i, S::sub(S::mul(first, c), S::mul(second, s)));
        S::store(head + half + i, S::add(S::mul(second, c), S::mul(first, s)));
    }
    for (; i < half; ++i) {
        const float first = head[i];
        const float second = head[half + i];
        head[i] = first * cos[i] - second * sin[i];
        head[half + i] = second * cos[i] + first * sin[i];
    }
}

template <typename S>
void rotate(const HeadRows& heads, float* row, std::int32_t begin, std::int32_t end, const float* cos,
            const float* sin) {
    for (std::int32_t h = begin; h < end && h < heads.num_q_heads + heads.num_kv_heads; ++h) {
        float* head = row + static_cast<std::size_t>(h) * heads.head_dim;
        const float* norm = h < heads.num_q_heads ? heads.q_norm : heads.k_norm;
        if (norm != nullptr) normalise_row<S>(head, heads.head_dim, norm, heads.norm_eps, head);
        rotate_head<S>(head, heads.rotary_dim / 2, cos, sin);
    }
}

// The first place of a row's largest element, and that element: NaN where any is.
template <typename S>
std::int32_t argmax(const float* row, std::int32_t width, float* maximum) {
    constexpr std::int32_t block = 16 * max_panel_columns;
    const float lowest = -__builtin_inff();
    auto nan = S::zero();
    float nan_in_tail = 0.0f;
    float best = lowest;
    std::int32_t best_block = 0;
    for (std::int32_t begin = 0; begin < width; begin += block) {
        const std::int32_t end = width - begin < block ? width : begin + block;
        auto largest = S::set(lowest);
        std::int32_t i = begin;
        for (; i + S::width <= end; i += S::width) {
            const auto x = S::load(row + i);
            largest = S::max(largest, x);
            // Between -1 and 1, or NaN: so is the sum of them. max() gives its second argument where one is NaN.
            nan = S::add(nan, S::max(S::set(-1.0f), S::sub(S::zero(), S::max(S::set(-1.0f), x))));
        }
        float block_best = S::reduce_max(largest);
        for (; i < end; ++i) {
            if (row[i] > block_best) block_best = row[i];
            if (row[i] != row[i]) nan_in_tail = row[i];
        }
        if (block_best > best) {
            best = block_best;
            best_block = begin;
        }
    }
    const float sum = S::reduce_add(nan) + nan_in_tail;
    *maximum = sum != sum ? sum : best;
    for (std::int32_t i = best_block; i < width; ++i)
        if (row[i] == best) return i;
    return 0;
}

}  // namespace
}  // namespace neoflex
