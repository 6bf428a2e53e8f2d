// Each set of linear kernels that runs here, against double precision.
#include <algorithm>
#include <limits>
#include <utility>

#include "check.h"
#include "linear.h"
#include "numbers.h"

using namespace neoflex;

namespace {

constexpr WeightType weight_types[] = {WeightType::fp32, WeightType::fp16, WeightType::bf16, WeightType::int8,
                                       WeightType::int4};

const char* name_of(WeightType type) {
    constexpr const char* names[] = {"fp32", "fp16", "bf16", "int8", "int4"};
    return names[static_cast<int>(type) - 1];
}

// Of types that are not quantised, which both enumerations number alike.
float rounded(WeightType type, float value) { return neoflex::rounded(static_cast<DType>(type), value); }

struct Shape {
    std::int32_t num_rows;
    std::int32_t num_columns;  // of the matrix: twice the outputs where it is gated
    std::int32_t depth;
};

double gate(Activation activation, double x) {
    if (activation == Activation::silu_gated) return x / (1 + std::exp(-x));
    return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// The weights of a matrix as a kernel reads them. That of quantised ones is checked in Python, against their formula.
std::vector<float> as_read(const LinearKernel& kernel, const Shape& shape, WeightType type,
                           const std::vector<float>& weights) {
    std::vector<float> read(weights.size());
    WeightArena arena;
    const PackedMatrix matrix(kernel, arena, weights.data(), nullptr, shape.num_columns, shape.depth, type,
                              Activation::none);
    for (std::int32_t c = 0; c < shape.num_columns; ++c) matrix.unpack_row(c, read.data() + c * shape.depth);
    for (std::size_t i = 0; i < read.size() && !is_quantised(type); ++i) CHECK(read[i] == rounded(type, weights[i]));
    // Half of a step of 1 / 127 of numbers of at most about 5, or of 1 / 15 of a range of 10.
    const float half_step = type == WeightType::int8 ? 0.03f : 0.7f;
    for (std::size_t i = 0; i < read.size(); ++i) CHECK(std::abs(read[i] - weights[i]) < half_step);
    return read;
}

// rows . weights^T + bias, of numbers as the kernel reads them but for rows beside quantised weights.
double product(const LinearKernel& kernel, const Shape& shape, WeightType type, const std::vector<float>& rows,
               const std::vector<float>& weights, const std::vector<float>& bias, std::int32_t row,
               std::int32_t column) {
    const WeightType row_type = kernel.rounds_rows && type == WeightType::bf16 ? type : WeightType::fp32;
    double sum = bias[column];
    for (std::int32_t k = 0; k < shape.depth; ++k)
        sum += double{rounded(row_type, rows[row * shape.depth + k])} * weights[column * shape.depth + k];
    return sum;
}

void check_product(const LinearKernel& kernel, ThreadPool& threads, const Shape& shape, WeightType type,
                   Activation activation) {
    std::mt19937 random(shape.num_rows + shape.num_columns + shape.depth);
    const auto rows = noise(random, std::size_t{1} * shape.num_rows * shape.depth);
    const auto weights = noise(random, std::size_t{1} * shape.num_columns * shape.depth);
    const auto bias = noise(random, shape.num_columns);
    WeightArena arena;
    const PackedMatrix matrix(kernel, arena, weights.data(), bias.data(), shape.num_columns, shape.depth, type,
                              activation);
    const std::int32_t outputs = matrix.num_outputs();
    const auto residual = noise(random, std::size_t{1} * shape.num_rows * outputs);
    const auto read = as_read(kernel, shape, type, weights);
    const bool adds = activation == Activation::none;
    std::vector<float> out(residual.size(), std::nanf(""));
    ProductResources resources{threads, {}};
    Product(matrix, rows.data(), shape.num_rows, resources).run(adds ? residual.data() : nullptr, out.data());
    const std::string text = std::string(kernel.name) + ", " + name_of(type) + ", " + std::to_string(shape.num_rows) +
                             " rows, " + std::to_string(shape.num_columns) + " columns, depth " +
                             std::to_string(shape.depth);
    // Each addition of a sum rounds to fp32.
    const double depth = shape.depth;
    double bound = 2e-6 * std::sqrt(depth) * std::max(1.0, std::sqrt(depth) / 8);
    // Rows are rounded to 1 / 65,534 of numbers of at most about 5.
    if (is_quantised(type)) bound += 5.0 / 65534 * depth;
    for (std::int32_t r = 0; r < shape.num_rows; ++r)
        for (std::int32_t c = 0; c < outputs; ++c) {
            const double sum = product(kernel, shape, type, rows, read, bias, r, c);
            double want = sum, slack = bound;
            if (adds) want += residual[r * outputs + c];
            if (activation == Activation::relu) want = std::max(sum, 0.0);
            if (is_gated(activation)) {
                want = gate(activation, sum) * product(kernel, shape, type, rows, read, bias, r, outputs + c);
                slack = (is_quantised(type) ? 4 * bound : 1e-4) + 1e-5 * std::abs(want);
            }
            check_near(text, out[r * outputs + c], want, slack);
        }
}

// Around the rows of a tile and of a block, the columns of a panel, and the depth of a span.
void test_products(const LinearKernel& kernel, ThreadPool& alone, ThreadPool& threads) {
    for (const WeightType type : weight_types) {
        for (const std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 13, 97})
            check_product(kernel, alone, {rows, 33, 19}, type, Activation::none);
        for (const std::int32_t columns : {1, 15, 16, 17, 32, 64})
            check_product(kernel, alone, {5, columns, 8}, type, Activation::none);
        for (const std::int32_t depth : {1, 2, 3, 31, 65, 640, 641, 1301})
            check_product(kernel, alone, {7, 17, depth}, type, Activation::none);
        check_product(kernel, threads, {9, 300, 96}, type, Activation::none);
        for (const Activation activation : {Activation::relu, Activation::silu_gated, Activation::gelu_tanh_gated})
            for (const Shape& shape : {Shape{1, 2, 3}, {13, 32, 20}, {7, 70, 31}})
                check_product(kernel, alone, shape, type, activation);
    }
}

void check_norm(const LinearKernel& kernel, std::int32_t width, bool centred, bool adds) {
    constexpr std::int32_t num_rows = 2;
    std::mt19937 random(width);
    const auto rows = noise(random, num_rows * width), residual = noise(random, num_rows * width);
    const auto weight = noise(random, width), bias = noise(random, width);
    std::vector<float> out(rows.size());
    const Norm norm{weight.data(), centred ? bias.data() : nullptr, 1e-5f, centred};
    kernel.normalise(norm, rows.data(), num_rows, width, adds ? residual.data() : nullptr, out.data());
    const std::string text = std::string(kernel.name) + ", norm over " + std::to_string(width);
    for (std::int32_t r = 0; r < num_rows; ++r) {
        const float* row = rows.data() + r * width;
        double mean = 0, squares = 0;
        for (std::int32_t i = 0; centred && i < width; ++i) mean += row[i] / double(width);
        for (std::int32_t i = 0; i < width; ++i) squares += std::pow(row[i] - mean, 2);
        for (std::int32_t i = 0; i < width; ++i) {
            const double x = (row[i] - mean) / std::sqrt(squares / width + 1e-5) * weight[i];
            const double want = x + (centred ? bias[i] : 0.0) + (adds ? residual[r * width + i] : 0.0);
            check_near(text, out[r * width + i], want, 1e-5 * (1 + std::abs(want)));
        }
    }
}

void test_norms(const LinearKernel& kernel) {
    for (const std::int32_t width : {1, 3, 8, 31, 64, 577}) {
        check_norm(kernel, width, false, false);
        check_norm(kernel, width, false, true);
        check_norm(kernel, width, true, false);
    }
}

// Query and key heads alone, of which only the first dimensions turn.
void check_rotation(const LinearKernel& kernel, std::int32_t rotary_dim, bool normed) {
    constexpr std::int32_t head_dim = 44, num_heads = 4;
    std::mt19937 random(rotary_dim);
    auto row = noise(random, num_heads * head_dim);
    const auto weight = noise(random, head_dim);
    std::vector<double> before(row.begin(), row.end());
    std::vector<float> cos, sin;
    for (std::int32_t i = 0; i < rotary_dim / 2; ++i) {
        cos.push_back(std::cos(static_cast<float>(i)));
        sin.push_back(std::sin(static_cast<float>(i)));
    }
    const float* norm = normed ? weight.data() : nullptr;
    kernel.rotate({2, 1, head_dim, rotary_dim, norm, norm, 1e-5f}, row.data(), 0, num_heads, cos.data(), sin.data());
    for (std::int32_t h = 0; h < num_heads; ++h) {
        double* head = before.data() + h * head_dim;
        const bool is_value = h == 3;
        double squares = 0;
        for (std::int32_t d = 0; d < head_dim; ++d) squares += head[d] * head[d];
        for (std::int32_t d = 0; normed && !is_value && d < head_dim; ++d)
            head[d] *= weight[d] / std::sqrt(squares / head_dim + 1e-5);
        for (std::int32_t d = 0; d < head_dim; ++d) {
            const std::int32_t half = rotary_dim / 2;
            double want = head[d];
            if (!is_value && d < half) want = head[d] * cos[d] - head[half + d] * sin[d];
            if (!is_value && d >= half && d < rotary_dim)
                want = head[d] * cos[d - half] + head[d - half] * sin[d - half];
            check_near(std::string(kernel.name) + ", rotation of " + std::to_string(rotary_dim), row[h * head_dim + d],
                       want, 2e-6 * (1 + std::abs(want)));
        }
    }
}

void test_rotations(const LinearKernel& kernel) {
    for (const std::int32_t rotary_dim : {0, 2, 22, 32, 44})
        for (const bool normed : {false, true}) check_rotation(kernel, rotary_dim, normed);
}

void test_argmax(const LinearKernel& kernel) {
    const float infinite = std::numeric_limits<float>::infinity();
    for (const std::int32_t width : {1, 5, 16, 511, 513, 1040}) {
        std::mt19937 random(width);
        auto row = noise(random, width);
        for (float& number : row) number = std::round(2 * number) - 20;  // many are equal, none positive
        float maximum = 0;
        const auto find = [&] { return kernel.argmax(row.data(), width, &maximum); };
        const auto largest = std::max_element(row.begin(), row.end());
        CHECK(find() == largest - row.begin());
        CHECK(maximum == *largest);
        row[width - 1] = infinite;
        CHECK(find() == width - 1 && maximum == infinite);
        for (const std::int32_t place : {0, width / 2, width - 1}) {
            const float kept = std::exchange(row[place], std::nanf(""));
            find();
            CHECK(std::isnan(maximum));
            row[place] = kept;
        }
        std::fill(row.begin(), row.end(), -infinite);
        CHECK(find() == 0 && maximum == -infinite);
    }
}

}  // namespace

int main() {
    ThreadPool alone(1), threads(3);
    alone.resize();
    threads.resize();
    for (const LinearKernel* kernel : runnable_linear_kernels()) {
        std::fprintf(stderr, "linear kernels tested: %s\n", kernel->name);
        test_products(*kernel, alone, threads);
        test_norms(*kernel);
        test_rotations(*kernel);
        test_argmax(*kernel);
    }
}
