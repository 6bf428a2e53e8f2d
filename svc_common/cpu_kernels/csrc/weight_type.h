// Types that weight matrices are kept in, and how. Its functions are always inlined, for the reason given in
// linear_body.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace neoflex {

// int8 and int4 are integers, scaled for each group of neighbouring depths of a column: integer * scale, of int4
// integer * scale + minimum.
enum class WeightType : std::uint32_t { fp32 = 1, fp16 = 2, bf16 = 3, int8 = 4, int4 = 5 };

[[gnu::always_inline]] constexpr bool is_quantised(WeightType type) {
    return type == WeightType::int8 || type == WeightType::int4;
}

// Depths that share a scale. With it a weight takes 8.25 or 5 bits.
[[gnu::always_inline]] constexpr std::int32_t group_depth(WeightType type) {
    return type == WeightType::int8 ? 64 : 32;
}

constexpr std::int32_t max_group_depth = 64;

// A group of a panel: scales [panel_columns], then its integers. int8: scales are bf16, integers
// [group_depth / 2, panel_columns, 2]. int4: scales are fp16 and so are the minima [panel_columns] that follow; then
// [group_depth / 4, panel_columns, 2] bytes, where byte j of quad i holds depth 4 i + j in its lower and 4 i + 2 + j in
// its upper half.
[[gnu::always_inline]] constexpr std::size_t group_bytes(WeightType type, std::int32_t panel_columns) {
    const std::size_t column_bytes = type == WeightType::int8 ? 2 + group_depth(type) : 4 + group_depth(type) / 2;
    return panel_columns * column_bytes;
}

// A group of a row that is multiplied with such weights, in words of 32 bits: its scale, and its sum, both fp32; then
// pairs of integers of 16 bits. The row is integer * scale, off by at most 1 / 65,534 of the group's largest number.
constexpr std::int32_t row_group_header_words = 2;

[[gnu::always_inline]] constexpr std::int32_t row_group_words(WeightType type) {
    return row_group_header_words + group_depth(type) / 2;
}

// Panels are cut, and padded, in units of so many depths.
[[gnu::always_inline]] constexpr std::int32_t unit_depth(WeightType type) {
    if (is_quantised(type)) return group_depth(type);
    return type == WeightType::bf16 ? 2 : 1;
}

[[gnu::always_inline]] constexpr std::size_t unit_bytes(WeightType type, std::int32_t panel_columns) {
    if (is_quantised(type)) return group_bytes(type, panel_columns);
    return panel_columns * std::size_t{type == WeightType::fp16 ? 2u : 4u};
}

[[gnu::always_inline]] constexpr std::int32_t num_units(WeightType type, std::int32_t depth) {
    return (depth + unit_depth(type) - 1) / unit_depth(type);
}

}  // namespace neoflex
