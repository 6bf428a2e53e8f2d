// Matrix products with packed weights: packing, and the split of a product over threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "linear_kernel.h"
#include "thread_pool.h"

namespace neoflex {

// Kernels that this processor runs, slowest first. Never empty.
const std::vector<const LinearKernel*>& runnable_linear_kernels();

// The kernel of that name, or the fastest for "auto". Throws std::invalid_argument where it does not run here.
const LinearKernel& choose_linear_kernel(const std::string& instruction_set);

constexpr bool is_gated(Activation activation) {
    return activation == Activation::silu_gated || activation == Activation::gelu_tanh_gated;
}

// Parts of weights begin at multiples of this: a cache line.
constexpr std::size_t weight_alignment = 64;

// Hands out memory for weights, part by part. Its own lies in huge pages where the system allows them: weights are read
// from end to end again and again, which with small pages costs a table look-up every few hundred nanoseconds. It is
// freed as a whole.
class WeightArena {
  public:
    WeightArena() = default;
    // Hands out `memory`, which is the caller's and large enough, or where that is null only counts.
    explicit WeightArena(std::byte* memory) : memory_(memory), owns_(false) {}
    ~WeightArena();
    WeightArena(const WeightArena&) = delete;
    WeightArena& operator=(const WeightArena&) = delete;

    // Aligned, and zeroed where it is the arena's own. Throws std::bad_alloc.
    std::byte* allocate(std::size_t num_bytes);
    // Bytes handed out of memory that is not its own.
    std::size_t num_counted() const { return owns_ ? 0 : used_; }

  private:
    struct Chunk {
        std::byte* data;
        std::size_t num_bytes;
    };
    std::byte* memory_ = nullptr;
    bool owns_ = true;
    std::vector<Chunk> chunks_;
    std::size_t used_ = 0;  // bytes of the last chunk, or of `memory_`
};

// One matrix, [num_columns, depth] as models keep it, in panels; see linear_kernel.h.
class PackedMatrix {
  public:
    // In the arena's memory, which holds such a matrix already, or in which `fill` is to pack it.
    PackedMatrix(const LinearKernel& kernel, WeightArena& arena, std::int32_t num_columns, std::int32_t depth,
                 WeightType type, Activation activation, bool has_bias);
    // Filled.
    PackedMatrix(const LinearKernel& kernel, WeightArena& arena, const float* weights, const float* bias,
                 std::int32_t num_columns, std::int32_t depth, WeightType type, Activation activation)
        : PackedMatrix(kernel, arena, num_columns, depth, type, activation, bias != nullptr) {
        fill(weights, bias);
    }

    // Packs `weights` [num_columns, depth] and `bias` [num_columns], null where the matrix has none, into zeroed memory
    // for products by `kernel`. A gated matrix has its gates in the first half of its rows and what they gate in the
    // second; a panel holds half a panel of each.
    void fill(const float* weights, const float* bias);

    const LinearKernel& kernel() const { return *kernel_; }
    std::int32_t num_columns() const { return num_columns_; }
    std::int32_t depth() const { return depth_; }
    bool gated() const { return is_gated(activation_); }
    Activation activation() const { return activation_; }
    // Columns of a product: half as many where gates are applied.
    std::int32_t num_outputs() const { return gated() ? num_columns_ / 2 : num_columns_; }
    std::int32_t panel_outputs() const { return kernel_->panel_columns / (gated() ? 2 : 1); }
    std::int32_t num_panels() const { return (num_outputs() + panel_outputs() - 1) / panel_outputs(); }
    std::size_t num_bytes() const { return num_panels() * panel_bytes_ + bias_bytes(); }
    WeightType type() const { return type_; }
    std::size_t panel_bytes() const { return panel_bytes_; }
    // Of one panel. Panels lie one after the other and hold no addresses.
    static std::size_t panel_bytes(const LinearKernel& kernel, WeightType type, std::int32_t depth);
    const std::byte* panels() const { return panels_; }
    const float* bias() const { return bias_; }  // in the order of the panels' columns, padded; null: none
    // Row `row` of the matrix, [depth], widened. Not of a gated one.
    void unpack_row(std::int32_t row, float* out) const;

  private:
    friend class Product;

    template <typename W>
    void pack(const float* weights);
    void pack_groups(const float* weights);
    // A column's group of weights to a panel's group.
    void pack_group(const float* weights, std::int32_t column, std::byte* to);
    // Of a quantised matrix.
    float unpack_one(std::int32_t row, std::int32_t k) const;
    // Bytes from a panel's start to the unit of depth `k`.
    std::size_t offset_in_panel(std::int32_t k) const {
        return k / unit_depth(type_) * unit_bytes(type_, kernel_->panel_columns);
    }
    std::size_t bias_bytes() const {
        return bias_ == nullptr ? 0 : static_cast<std::size_t>(num_panels()) * kernel_->panel_columns * sizeof(float);
    }
    // The row of the matrix that is column `column` of panel `panel`, -1 for padding.
    std::int32_t row_of(std::int32_t panel, std::int32_t column) const;

    const LinearKernel* kernel_;
    std::int32_t num_columns_;
    std::int32_t depth_;
    WeightType type_;
    Activation activation_;
    std::size_t panel_bytes_;
    std::byte* panels_;
    float* bias_ = nullptr;  // in the order of the panels' columns, padded; null: none
};

// What products need beside their operands: threads, and memory that grows to the largest batch seen.
struct ProductResources {
    ThreadPool& threads;
    std::vector<std::uint32_t> rounded_rows;
};

// The product of one matrix with a batch of dense rows of fp32, [num_rows, depth].
class Product {
  public:
    Product(const PackedMatrix& matrix, const float* rows, std::int32_t num_rows, ProductResources& resources)
        : matrix_(matrix), kernel_(matrix.kernel()), num_rows_(num_rows), threads_(resources.threads) {
        take_rows(rows, resources);
    }

    // rows . matrix^T + bias + residual, on all threads, or what the matrix's activation makes of it without a residual.
    // `out` [num_rows, num_outputs]; `residual` is null or like `out`. The product is made in pieces that end at multiples of `unit` panels, and after each
    // finish(first_row, end_row, first_output, end_output) is called on the thread that made it.
    template <typename Finish>
    void run(const float* residual, float* out, std::int32_t unit, Finish&& finish) const {
        const std::int32_t piece = piece_panels(unit);
        const std::int32_t num_pieces = (matrix_.num_panels() + piece - 1) / piece;
        threads_.run(static_cast<std::uint32_t>(num_pieces), worth_helpers(), [&](std::uint32_t task, int) {
            const std::int32_t begin = static_cast<std::int32_t>(task) * piece;
            const std::int32_t end = std::min(begin + piece, matrix_.num_panels());
            const std::int32_t blocks = (num_rows_ + max_block_rows - 1) / max_block_rows;
            for (std::int32_t block = 0; block < blocks; ++block) {
                const auto first_row = static_cast<std::int32_t>(std::int64_t{num_rows_} * block / blocks);
                const auto end_row = static_cast<std::int32_t>(std::int64_t{num_rows_} * (block + 1) / blocks);
                for (std::int32_t panel = begin; panel < end; ++panel)
                    multiply_panel(first_row, end_row, panel, residual, out);
                finish(first_row, end_row, begin * matrix_.panel_outputs(),
                       std::min(end * matrix_.panel_outputs(), matrix_.num_outputs()));
            }
        });
    }
    void run(const float* residual, float* out) const {
        run(residual, out, 1, [](std::int32_t, std::int32_t, std::int32_t, std::int32_t) {});
    }

  private:
    void take_rows(const float* rows, ProductResources& resources);
    std::int32_t piece_panels(std::int32_t unit) const;
    bool worth_helpers() const;
    void multiply_panel(std::int32_t first_row, std::int32_t end_row, std::int32_t panel, const float* residual,
                        float* out) const;

    const PackedMatrix& matrix_;
    const LinearKernel& kernel_;
    // As the kernel wants them: fp32, or words of as many bytes, so many for each unit of depth.
    const std::uint32_t* rows_ = nullptr;
    std::int32_t unit_depth_ = 1;
    std::int32_t unit_words_ = 1;
    std::size_t row_words_ = 0;  // from a row to the next
    std::int32_t num_rows_;
    ThreadPool& threads_;
};

}  // namespace neoflex
