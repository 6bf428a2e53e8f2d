#include "linear.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "half.h"
#include "processor.h"
#include "quantise.h"

namespace neoflex {

namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;
constexpr std::size_t chunk_bytes = std::size_t{64} << 20;
constexpr std::size_t line_bytes = weight_alignment;

// At most this much of a row is multiplied in one go, so that a tile of rows stays in the first-level cache and a
// panel in the second. Even and of whole units, see linear_kernel.h.
constexpr std::int32_t max_span_depth = 640;

// Pieces per thread at least, where there are as many panels: threads do not start and run alike.
constexpr std::int32_t pieces_per_thread = 12;
constexpr std::int32_t max_piece_panels = 8;

// Less than this many multiply-adds, or elements to round, take no longer than waking a thread.
constexpr std::int64_t min_products_for_helpers = 200'000;
constexpr std::int64_t min_elements_for_helpers = 32'768;

std::size_t round_up(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }

std::vector<const LinearKernel*> find_runnable() {
    std::vector<const LinearKernel*> kernels{&scalar_linear_kernel};
#if defined(NEOFLEX_X86)
    if (has_avx2()) kernels.push_back(&avx2_linear_kernel);
    if (has_avx512()) kernels.push_back(&avx512_linear_kernel);
    if (has_avx512_bf16()) kernels.push_back(&avx512_bf16_linear_kernel);
#endif
#if defined(NEOFLEX_NEON)
    kernels.push_back(&neon_linear_kernel);  // part of AArch64
#endif
    return kernels;
}

// Where the weight of `depth` and `column` lies in a panel, or in the integers of a group of int8.
template <typename W>
std::size_t place(std::int32_t depth, std::int32_t column, std::int32_t panel_columns) {
    const auto k = static_cast<std::size_t>(depth);
    if constexpr (std::is_same_v<W, BFloat> || std::is_same_v<W, std::int8_t>)
        return (k / 2 * panel_columns + column) * 2 + k % 2;
    return k * panel_columns + column;
}

template <typename F>
auto with_type(WeightType type, F f) {
    if (type == WeightType::fp16) return f(static_cast<Half*>(nullptr));
    if (type == WeightType::bf16) return f(static_cast<BFloat*>(nullptr));
    return f(static_cast<float*>(nullptr));
}

// Half a byte of a group of int4.
struct Nibble {
    std::size_t byte;
    int shift;
};

Nibble nibble_of(std::int32_t depth, std::int32_t column, std::int32_t panel_columns) {
    const std::int32_t in_quad = depth % 4;
    return {(static_cast<std::size_t>(depth / 4) * panel_columns + column) * 2 + in_quad % 2, in_quad / 2 * 4};
}

}  // namespace

const std::vector<const LinearKernel*>& runnable_linear_kernels() {
    static const std::vector<const LinearKernel*> kernels = find_runnable();
    return kernels;
}

const LinearKernel& choose_linear_kernel(const std::string& instruction_set) {
    if (instruction_set == "auto") return *runnable_linear_kernels().back();
    std::string names;
    for (const LinearKernel* kernel : runnable_linear_kernels()) {
        if (kernel->name == instruction_set) return *kernel;
        names += std::string(names.empty() ? "" : ", ") + kernel->name;
    }
    throw std::invalid_argument("instruction set \"" + instruction_set + "\" does not run here; these do: " + names);
}

WeightArena::~WeightArena() {
    for (const Chunk& chunk : chunks_) munmap(chunk.data, chunk.num_bytes);
}

std::byte* WeightArena::allocate(std::size_t num_bytes) {
    num_bytes = round_up(num_bytes, line_bytes);
    if (!owns_) {
        std::byte* part = memory_ == nullptr ? nullptr : memory_ + used_;
        used_ += num_bytes;
        return part;
    }
    if (chunks_.empty() || used_ + num_bytes > chunks_.back().num_bytes) {
        // What is large gets its own, so that a layer takes what it needs and no chunk.
        const bool is_large = num_bytes > chunk_bytes / 16;
        const std::size_t wanted = is_large ? round_up(num_bytes, huge_page_bytes) : chunk_bytes;
        void* data = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        madvise(data, wanted, MADV_HUGEPAGE);
        chunks_.push_back({static_cast<std::byte*>(data), wanted});
        used_ = 0;
    }
    std::byte* result = chunks_.back().data + used_;
    used_ += num_bytes;
    return result;
}

PackedMatrix::PackedMatrix(const LinearKernel& kernel, WeightArena& arena, std::int32_t num_columns, std::int32_t depth,
                           WeightType type, Activation activation, bool has_bias)
    : kernel_(&kernel), num_columns_(num_columns), depth_(depth), type_(type), activation_(activation) {
    const std::int32_t panel_columns = kernel.panel_columns;
    if (gated() && num_columns % 2 != 0) throw std::invalid_argument("a gated matrix has an even number of rows");
    panel_bytes_ = panel_bytes(kernel, type, depth);
    panels_ = arena.allocate(num_panels() * panel_bytes_);
    if (!has_bias) return;
    const std::size_t bias_columns = static_cast<std::size_t>(num_panels()) * panel_columns;
    bias_ = reinterpret_cast<float*>(arena.allocate(bias_columns * sizeof(float)));
}

void PackedMatrix::fill(const float* weights, const float* bias) {
    if (is_quantised(type_)) {
        pack_groups(weights);
    } else {
        with_type(type_, [&]<typename W>(W*) { pack<W>(weights); });
    }
    if (bias_ == nullptr) return;
    const std::int32_t panel_columns = kernel_->panel_columns;
    for (std::int32_t panel = 0; panel < num_panels(); ++panel)
        for (std::int32_t c = 0; c < panel_columns; ++c)
            if (const std::int32_t row = row_of(panel, c); row >= 0) bias_[panel * panel_columns + c] = bias[row];
}

std::size_t PackedMatrix::panel_bytes(const LinearKernel& kernel, WeightType type, std::int32_t depth) {
    return round_up(num_units(type, depth) * unit_bytes(type, kernel.panel_columns), line_bytes);
}

std::int32_t PackedMatrix::row_of(std::int32_t panel, std::int32_t column) const {
    const bool second = gated() && column >= panel_outputs();
    const std::int32_t output = panel * panel_outputs() + (second ? column - panel_outputs() : column);
    if (output >= num_outputs()) return -1;
    return second ? num_outputs() + output : output;
}

template <typename W>
void PackedMatrix::pack(const float* weights) {
    for (std::int32_t panel = 0; panel < num_panels(); ++panel) {
        auto* to = reinterpret_cast<W*>(panels_ + panel * panel_bytes_);
        for (std::int32_t c = 0; c < kernel_->panel_columns; ++c) {
            const std::int32_t row = row_of(panel, c);
            if (row < 0) continue;
            const float* from = weights + static_cast<std::size_t>(row) * depth_;
            for (std::int32_t k = 0; k < depth_; ++k) store_one(to + place<W>(k, c, kernel_->panel_columns), from[k]);
        }
    }
}

void PackedMatrix::pack_groups(const float* weights) {
    const std::int32_t size = group_depth(type_);
    std::vector<float> group(size);
    for (std::int32_t panel = 0; panel < num_panels(); ++panel)
        for (std::int32_t c = 0; c < kernel_->panel_columns; ++c) {
            const std::int32_t row = row_of(panel, c);
            if (row < 0) continue;
            const float* from = weights + static_cast<std::size_t>(row) * depth_;
            for (std::int32_t k = 0; k < depth_; k += size) {
                std::fill(std::copy_n(from + k, std::min(size, depth_ - k), group.begin()), group.end(), 0.0f);
                pack_group(group.data(), c, panels_ + panel * panel_bytes_ + offset_in_panel(k));
            }
        }
}

void PackedMatrix::pack_group(const float* weights, std::int32_t column, std::byte* to) {
    const std::int32_t columns = kernel_->panel_columns;
    auto* bytes = reinterpret_cast<std::uint8_t*>(to);
    if (type_ == WeightType::int8) {
        std::int8_t integers[group_depth(WeightType::int8)];
        store_one(reinterpret_cast<BFloat*>(to) + column, quantise_int8(weights, integers));
        for (std::int32_t k = 0; k < group_depth(type_); ++k)
            bytes[2 * columns + place<std::int8_t>(k, column, columns)] = static_cast<std::uint8_t>(integers[k]);
        return;
    }
    std::uint8_t integers[group_depth(WeightType::int4)];
    const ScaleAndMinimum found = quantise_int4(weights, integers);
    store_one(reinterpret_cast<Half*>(to) + column, found.scale);
    store_one(reinterpret_cast<Half*>(to) + columns + column, found.minimum);
    for (std::int32_t k = 0; k < group_depth(type_); ++k) {
        const Nibble nibble = nibble_of(k, column, columns);
        bytes[4 * columns + nibble.byte] |= static_cast<std::uint8_t>(integers[k] << nibble.shift);
    }
}

float PackedMatrix::unpack_one(std::int32_t row, std::int32_t k) const {
    const std::int32_t columns = kernel_->panel_columns, column = row % columns, depth = k % group_depth(type_);
    const std::byte* group = panels_ + row / columns * panel_bytes_ + offset_in_panel(k);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(group);
    if (type_ == WeightType::int8) {
        const auto integer = static_cast<std::int8_t>(bytes[2 * columns + place<std::int8_t>(depth, column, columns)]);
        return integer * to_float(reinterpret_cast<const BFloat*>(group)[column]);
    }
    const auto* scales = reinterpret_cast<const Half*>(group);
    const Nibble nibble = nibble_of(depth, column, columns);
    const int integer = bytes[4 * columns + nibble.byte] >> nibble.shift & 15;
    return integer * to_float(scales[column]) + to_float(scales[columns + column]);
}

void PackedMatrix::unpack_row(std::int32_t row, float* out) const {
    if (is_quantised(type_)) {
        for (std::int32_t k = 0; k < depth_; ++k) out[k] = unpack_one(row, k);
        return;
    }
    const std::int32_t columns = kernel_->panel_columns;
    with_type(type_, [&]<typename W>(W*) {
        const auto* from = reinterpret_cast<const W*>(panels_ + row / columns * panel_bytes_);
        for (std::int32_t k = 0; k < depth_; ++k) out[k] = to_float(from[place<W>(k, row % columns, columns)]);
    });
}

void Product::take_rows(const float* rows, ProductResources& resources) {
    const std::int32_t depth = matrix_.depth_;
    const WeightType type = matrix_.type_;
    const bool rounds = kernel_.rounds_rows && type == WeightType::bf16;
    if (is_quantised(type) || rounds) {
        unit_depth_ = unit_depth(type);
        unit_words_ = rounds ? 1 : row_group_words(type);
    }
    row_words_ = static_cast<std::size_t>((depth + unit_depth_ - 1) / unit_depth_) * unit_words_;
    if (unit_depth_ == 1) {
        rows_ = reinterpret_cast<const std::uint32_t*>(rows);
        return;
    }
    std::vector<std::uint32_t>& rounded = resources.rounded_rows;
    if (rounded.size() < num_rows_ * row_words_) rounded.resize(num_rows_ * row_words_);
    const bool wake = std::int64_t{num_rows_} * depth >= min_elements_for_helpers;
    threads_.run(static_cast<std::uint32_t>(num_rows_), wake, [&](std::uint32_t row, int) {
        const float* from = rows + std::size_t{row} * depth;
        std::uint32_t* to = rounded.data() + row * row_words_;
        if (is_quantised(type)) {
            kernel_.quantise_row(type, from, depth, to);
        } else {
            kernel_.round_row(from, depth, reinterpret_cast<std::uint16_t*>(to));
        }
    });
    rows_ = rounded.data();
}

std::int32_t Product::piece_panels(std::int32_t unit) const {
    if (threads_.num_running() == 1) return round_up(matrix_.num_panels(), unit);
    const std::int32_t fair = matrix_.num_panels() / (threads_.num_running() * pieces_per_thread);
    return static_cast<std::int32_t>(round_up(std::clamp(fair, 1, max_piece_panels), unit));
}

bool Product::worth_helpers() const {
    return std::int64_t{num_rows_} * matrix_.num_columns() * matrix_.depth() >= min_products_for_helpers;
}

void Product::multiply_panel(std::int32_t first_row, std::int32_t end_row, std::int32_t panel, const float* residual,
                             float* out) const {
    alignas(line_bytes) float sums[max_block_rows * max_panel_columns];
    const std::int32_t num_rows = end_row - first_row;
    const std::uint32_t* rows = rows_ + first_row * row_words_;
    const std::byte* weights = matrix_.panels_ + panel * matrix_.panel_bytes_;
    const std::int32_t num_spans = (matrix_.depth_ + max_span_depth - 1) / max_span_depth;
    const std::int32_t step = std::max(2, unit_depth(matrix_.type_));
    const auto span = static_cast<std::int32_t>(round_up((matrix_.depth_ + num_spans - 1) / num_spans, step));
    for (std::int32_t k = 0; k < matrix_.depth_; k += span)
        kernel_.accumulate(matrix_.type_, rows + k / unit_depth_ * unit_words_, row_words_, num_rows,
                           weights + matrix_.offset_in_panel(k), std::min(span, matrix_.depth_ - k), k == 0, sums);
    const std::int32_t first = panel * matrix_.panel_outputs();
    const std::int32_t count = std::min(matrix_.panel_outputs(), matrix_.num_outputs() - first);
    const float* bias = matrix_.bias_ == nullptr ? nullptr : matrix_.bias_ + panel * kernel_.panel_columns;
    const std::size_t stride = matrix_.num_outputs();
    const std::size_t corner = first_row * stride + first;
    if (matrix_.activation_ != Activation::none) {
        kernel_.store_activated(matrix_.activation_, sums, num_rows, count, bias, out + corner, stride);
    } else {
        kernel_.store(sums, num_rows, count, bias, residual == nullptr ? nullptr : residual + corner, out + corner,
                      stride);
    }
}

}  // namespace neoflex
