// What the kernels of the linear layers are given and what they do; one implementation per instruction set.
//
// Holds nothing that a compiler could emit as code, for the reason given in linear_body.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weight_type.h"

namespace neoflex {

// Weights [num_columns, depth] lie in panels of `panel_columns` columns: [num_panels, depth, panel_columns], the last
// panel padded with zeros. bf16 keeps pairs of depths side by side, [num_panels, depth / 2, panel_columns, 2], padded
// where depth is odd: widening a pair takes one instruction each, and some processors multiply pairs. int8 and int4 are
// in groups of depths, padded to whole ones; see weight_type.h.
constexpr std::int32_t max_panel_columns = 32;

// Rows that are multiplied with a panel at a time: their part of the input stays in the second-level cache.
constexpr std::int32_t max_block_rows = 96;

// What is made of a product before it is stored. Gated: the first half of its columns are gates, each through the
// function, of the second half.
enum class Activation : std::int32_t { none, relu, silu_gated, gelu_tanh_gated };

// A norm over rows of some width. Centred: LayerNorm, which subtracts the mean first; else RMSNorm.
struct Norm {
    const float* weight;  // [width]
    const float* bias;    // [width], null for RMSNorm
    float eps;
    bool centred;
};

// Heads in a row of q, k and v: [num_q_heads + 2 * num_kv_heads, head_dim].
struct HeadRows {
    std::int32_t num_q_heads;
    std::int32_t num_kv_heads;
    std::int32_t head_dim;
    std::int32_t rotary_dim;  // even, at most head_dim; 0: heads are not rotated
    const float* q_norm;      // [head_dim], null where heads are not normalised
    const float* k_norm;
    float norm_eps;
};

struct LinearKernel {
    const char* name;
    std::int32_t panel_columns;
    // Whether products with bf16 weights want rows of bf16, padded with zero to an even depth.
    bool rounds_rows;
    // Rounds one row to bf16, padding included.
    void (*round_row)(const float* row, std::int32_t depth, std::uint16_t* out);
    // Makes groups of one row for products with weights of a quantised type: `out` has row_group_words() for each.
    // Products of a group with a number that is not finite are NaN.
    void (*quantise_row)(WeightType, const float* row, std::int32_t depth, std::uint32_t* out);
    // sums [num_rows, panel_columns] = (start ? 0 : sums) + rows [num_rows, depth] . weights [depth, panel_columns].
    // Each sum adds its products, or pairs or groups of them, in the order of depth, so it depends neither on the other
    // rows nor on where depth is cut. `weights` point into a panel, at an even depth or the start of a group. `rows`
    // are fp32, or words of 32 bits as round_row or quantise_row made them, `row_stride` of these apart. At most
    // max_block_rows rows.
    void (*accumulate)(WeightType, const void* rows, std::size_t row_stride, std::int32_t num_rows,
                       const void* weights, std::int32_t depth, bool start, float* sums);
    // out [num_rows, num_columns] = sums + bias + residual; either may be null. `residual` lies like `out` and may be
    // it. `bias` has panel_columns.
    void (*store)(const float* sums, std::int32_t num_rows, std::int32_t num_columns, const float* bias,
                  const float* residual, float* out, std::size_t out_stride);
    // out [num_rows, num_columns] = what the activation, not none, makes of sums + bias.
    void (*store_activated)(Activation, const float* sums, std::int32_t num_rows, std::int32_t num_columns,
                            const float* bias, float* out, std::size_t out_stride);
    // out = (rows - mean) / sqrt(mean((rows - mean)^2) + eps) * weight + bias; where the norm is not centred, rows /
    // sqrt(mean(rows^2) + eps) * weight + residual, and the residual may be null. All [num_rows, width]; out may be rows
    // or residual.
    void (*normalise)(const Norm&, const float* rows, std::int32_t num_rows, std::int32_t width,
                      const float* residual, float* out);
    // Normalises and rotates the q and k heads among heads [begin, end) of one row, in place. `cos` and `sin` are the
    // row's, [rotary_dim / 2].
    void (*rotate)(const HeadRows&, float* row, std::int32_t begin, std::int32_t end, const float* cos,
                   const float* sin);
    // The first place of the largest element of row [width], which goes to `maximum`; that is NaN where any element is.
    std::int32_t (*argmax)(const float* row, std::int32_t width, float* maximum);
};

extern const LinearKernel scalar_linear_kernel;
#if defined(NEOFLEX_X86)
extern const LinearKernel avx2_linear_kernel;
extern const LinearKernel avx512_linear_kernel;
extern const LinearKernel avx512_bf16_linear_kernel;
#endif
#if defined(NEOFLEX_NEON)
extern const LinearKernel neon_linear_kernel;
#endif

}  // namespace neoflex
