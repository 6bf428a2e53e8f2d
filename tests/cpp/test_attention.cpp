// Each set of attention kernels that runs here: what it writes, copies and computes, against double precision.
#include <limits>

#include "check.h"
#include "kernels.h"
#include "kv_reference.h"
#include "prefill_attention.h"

using namespace neoflex;

namespace {

constexpr DType kv_dtypes[] = {DType::fp32, DType::fp16, DType::bf16, DType::int8};
constexpr DType exchange_dtypes[] = {DType::fp32, DType::fp16, DType::bf16};

// Of bounds that fp32 rounds.
constexpr double rounding = 1 + 5e-5;

// Of an output of about 1: what its own type rounds, the scores' rounding in proportion to their cap, and in int8
// queries and weights of 16 bits.
double tolerance(const Case& what) {
    const double exact = what.exchange_dtype == DType::fp32 ? 8e-6 : what.exchange_dtype == DType::fp16 ? 2e-3 : 2e-2;
    return exact + 4e-7 * what.softcap + (what.kv_dtype == DType::int8 ? 3e-4 : 0.0);
}

std::vector<std::byte> encode(DType dtype, const std::vector<float>& numbers) {
    std::vector<std::byte> bytes(numbers.size() * dtype_bytes(dtype));
    for (std::size_t i = 0; i < numbers.size(); ++i) store(dtype, bytes.data(), i, numbers[i]);
    return bytes;
}

std::vector<std::byte> random_kv(const Case& what, std::int32_t num_tokens, std::mt19937& random) {
    return encode(what.exchange_dtype,
                  noise(random, std::size_t{2} * num_tokens * what.heads.num_kv_heads * what.head_dim));
}

// A block's scale is its largest magnitude / 127.
void check_scales(const std::string& text, const Case& what, const Cache& cache, const std::vector<std::byte>& kv,
                  std::int32_t num_tokens) {
    for (std::int32_t first = 0; first < num_tokens; first += what.block_tokens)
        for (int value = 0; value < 2; ++value)
            for (std::int32_t h = 0; h < what.heads.num_kv_heads; ++h) {
                double largest = 0;
                for (std::int32_t t = first; t < std::min(first + what.block_tokens, num_tokens); ++t)
                    for (std::int32_t d = 0; d < what.head_dim; ++d) {
                        const std::size_t row = (std::size_t{2} * t + value) * what.heads.num_kv_heads + h;
                        const float number = load(what.exchange_dtype, kv.data(), row * what.head_dim + d);
                        largest = std::max(largest, std::abs(double{number}));
                    }
                check_near(text + ", scale", cache.scale(cache.table()[first / what.block_tokens], value, h),
                           largest / 127, largest * 1e-8);
            }
}

// Floats are rounded each for itself; in int8, a block's tokens that come together are off by half its scale.
void check_written(const std::string& text, const Case& what, const Cache& cache, const std::vector<std::byte>& kv,
                   std::int32_t num_tokens) {
    std::size_t i = 0;
    for (std::int32_t t = 0; t < num_tokens; ++t)
        for (int value = 0; value < 2; ++value)
            for (std::int32_t h = 0; h < what.heads.num_kv_heads; ++h)
                for (std::int32_t d = 0; d < what.head_dim; ++d, ++i) {
                    const float exact = rounded(what.kv_dtype, load(what.exchange_dtype, kv.data(), i));
                    const double scale = cache.scale(cache.table()[t / what.block_tokens], value, h);
                    check_near(text, cache.number(t, value, h, d), exact,
                               what.kv_dtype == DType::int8 ? scale / 2 * rounding : 0.0);
                }
    if (what.kv_dtype == DType::int8) check_scales(text, what, cache, kv, num_tokens);
    cache.check_others_untouched();
}

void check_decode(const std::string& text, const Case& what, const Kernel& kernel, ThreadPool& threads, Cache& cache,
                  const std::vector<std::int32_t>& contexts, std::mt19937& random) {
    const auto num = static_cast<std::int32_t>(contexts.size());
    const std::int32_t num_heads = what.heads.num_q_heads;
    const std::size_t head_bytes = what.head_dim * dtype_bytes(what.exchange_dtype);
    const auto q = encode(what.exchange_dtype, noise(random, std::size_t{1} * num * num_heads * what.head_dim));
    std::vector<std::byte> out(q.size());
    std::vector<std::int32_t> tables;
    for (std::int32_t s = 0; s < num; ++s) tables.insert(tables.end(), cache.table().begin(), cache.table().end());
    const DecodeBatch batch{num, contexts.data(), tables.data(), cache.num_blocks()};
    DecodeAttention attention(kernel, what.heads, what.shape(), threads);
    DecodePlan plan(batch, what.heads, what.shape(), what.sliding_window, threads.num_running());
    const std::size_t stride = std::size_t{1} * num_heads * what.head_dim;
    const Blocks kv = cache.blocks();
    attention.run(plan, {kv.pool, kv.scales, q.data(), stride, nullptr, nullptr, out.data(), stride});
    for (std::int32_t s = 0; s < num; ++s)
        for (std::int32_t h = 0; h < num_heads; ++h) {
            const std::size_t row = (std::size_t{1} * s * num_heads + h) * head_bytes;
            const auto want = cache.attend(q.data() + row, h, contexts[s]);
            for (std::int32_t d = 0; d < what.head_dim; ++d)
                check_near(text, load(what.exchange_dtype, out.data() + row, d), want[d], tolerance(what));
        }
}

// q and out as parts of wider rows.
void check_prefill(const std::string& text, const Case& what, const Kernel& kernel, ThreadPool& threads, Cache& cache,
                   std::int32_t start, std::int32_t num_tokens, std::mt19937& random) {
    const std::size_t stride = (what.heads.num_q_heads + std::size_t{2}) * what.head_dim;
    const auto q = encode(what.exchange_dtype, noise(random, num_tokens * stride));
    std::vector<std::byte> out(q.size());
    PrefillAttention(kernel, what.heads, what.shape(), threads)
        .run({start, num_tokens, what.sliding_window, cache.table().data()},
             {cache.blocks().pool, cache.blocks().scales, q.data(), stride, out.data(), stride});
    for (std::int32_t t = 0; t < num_tokens; ++t)
        for (std::int32_t h = 0; h < what.heads.num_q_heads + 2; ++h) {
            const std::size_t row = (t * stride + h * what.head_dim) * dtype_bytes(what.exchange_dtype);
            const auto want = h < what.heads.num_q_heads ? cache.attend(q.data() + row, h, start + t + 1)
                                                         : std::vector<double>(what.head_dim);
            for (std::int32_t d = 0; d < what.head_dim; ++d)
                check_near(text, load(what.exchange_dtype, out.data() + row, d), want[d], tolerance(what));
        }
}

// Writes, decodes and a prefill chunk that ends with the last of the tokens.
void check_case(const Kernel& kernel, ThreadPool& threads, const Case& what, std::int32_t num_tokens,
                std::int32_t num_prefilled) {
    std::mt19937 random(num_tokens + what.head_dim);
    const std::string text = what.text(kernel.name) + ", " + std::to_string(num_tokens) + " tokens";
    Cache cache(what, num_tokens, random);
    const auto kv = random_kv(what, num_tokens, random);
    cache.write(kernel, threads, kv, num_tokens);
    check_written(text, what, cache, kv, num_tokens);
    check_decode(text, what, kernel, threads, cache, {num_tokens, (num_tokens + 1) / 2, 1}, random);
    check_prefill(text, what, kernel, threads, cache, num_tokens - num_prefilled, num_prefilled, random);
}

void test_every_type_and_dimension(const Kernel& kernel, ThreadPool& threads) {
    for (const DType kv_dtype : kv_dtypes)
        for (const DType exchange_dtype : exchange_dtypes)
            for (const std::int32_t head_dim : {1, 4, 15, 33, 64, 80})
                check_case(kernel, threads, {{2, 1}, head_dim, 16, kv_dtype, exchange_dtype}, 21, 7);
}

void test_head_ratios_and_blocks(const Kernel& kernel, ThreadPool& threads) {
    for (const DType kv_dtype : kv_dtypes) {
        for (const HeadCounts heads : {HeadCounts{1, 1}, {6, 2}, {5, 1}, {9, 3}, {7, 1}})
            check_case(kernel, threads, {heads, 16, 5, kv_dtype, DType::fp32}, 13, 13);
        for (const std::int32_t block_tokens : {1, 2, 7, 24, 64})
            check_case(kernel, threads, {{4, 2}, 20, block_tokens, kv_dtype, DType::fp32}, 70, 9);
    }
}

// More than a chunk of the kernels, in spans that are merged, with a window and a cap.
void test_long_contexts(const Kernel& kernel, ThreadPool& threads) {
    for (const DType kv_dtype : kv_dtypes) {
        check_case(kernel, threads, {{2, 1}, 64, 16, kv_dtype, DType::fp32}, 700, 3);
        check_case(kernel, threads, {{2, 1}, 32, 16, kv_dtype, DType::fp32, 0, 5.0f}, 200, 40);
        check_case(kernel, threads, {{3, 1}, 32, 6, kv_dtype, DType::bf16, 70}, 300, 20);
    }
}

// Appended one by one, numbers in int8 are rounded again as their block's scale grows.
void test_int8_is_rounded_as_by_the_scalar_kernel(const Kernel& kernel, ThreadPool& threads) {
    for (const std::int32_t block_tokens : {4, 7}) {
        const Case what{{2, 2}, 37, block_tokens, DType::int8, DType::fp32};
        std::mt19937 random(5), same(5);
        Cache plain(what, 30, random), other(what, 30, same);
        auto numbers = noise(random, 30 * 2 * 2 * 37);
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] *= std::exp(0.001f * static_cast<float>(i));
        const auto kv = encode(what.exchange_dtype, numbers);
        plain.write(scalar_kernel, threads, kv, 1);
        other.write(kernel, threads, kv, 1);
        const std::string text = what.text(kernel.name) + ", one by one";
        for (std::int32_t t = 0; t < 30; ++t)
            for (int value = 0; value < 2; ++value)
                for (std::int32_t h = 0; h < 2; ++h)
                    for (std::int32_t d = 0; d < 37; ++d)
                        check_near(text, other.number(t, value, h, d), plain.number(t, value, h, d), 0.0);
    }
}

// NaN with and without all of its bits, what overflows or is denormal in 16 bits, and what lies between two of them.
void test_numbers_at_the_edge_of_their_type(const Kernel& kernel, ThreadPool& threads) {
    constexpr std::int32_t num_tokens = 4, head_dim = 21;
    const float infinite = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
    const float edges[] = {from_bits(0x7fffffffu), from_bits(0xffffffffu), std::nanf(""), infinite, -infinite, largest,
                           -largest, 65504.0f, 65519.0f, 65520.0f, 6e-8f, 2.9e-8f, 3e-5f, 1e-40f, 0.0f, -0.0f,
                           1.00390625f, 1.01171875f, 1.00048828125f, 1.00146484375f};
    std::vector<float> numbers;
    for (int i = 0; i < 2 * num_tokens * head_dim; ++i) numbers.push_back(edges[i % std::size(edges)]);
    const auto kv = encode(DType::fp32, numbers);
    for (const DType kv_dtype : exchange_dtypes) {
        const Case what{{1, 1}, head_dim, 16, kv_dtype, DType::fp32};
        std::mt19937 random(1);
        Cache cache(what, num_tokens, random);
        cache.write(kernel, threads, kv, num_tokens);
        check_written(what.text(kernel.name) + ", edges", what, cache, kv, num_tokens);
    }
}

// What is no number does as in the formula: a weight of 0 hides nothing, scores of -infinity alone are no number.
void test_nan_and_infinity(const Kernel& kernel, ThreadPool& threads) {
    const float infinite = std::numeric_limits<float>::infinity();
    for (const DType kv_dtype : exchange_dtypes)
        for (const float special : {std::nanf(""), infinite, -infinite})
            for (const int value : {0, 1}) {
                const Case what{{2, 1}, 32, 16, kv_dtype, kv_dtype};
                std::mt19937 random(3);
                Cache cache(what, 40, random);
                cache.write(kernel, threads, random_kv(what, 40, random), 40);
                cache.set(19, value, 0, 5, special);
                check_decode(what.text(kernel.name) + ", not finite", what, kernel, threads, cache, {19, 40}, random);
            }
}

void test_copies_between_types(const Kernel& kernel, ThreadPool& threads) {
    constexpr std::int32_t num_tokens = 17, head_dim = 15, block_tokens = 7;
    for (const DType from_dtype : kv_dtypes)
        for (const DType to_dtype : kv_dtypes) {
            const Case source{{2, 2}, head_dim, block_tokens, from_dtype, DType::fp32};
            const Case target{{2, 2}, head_dim, block_tokens, to_dtype, DType::fp32};
            std::mt19937 random(9);
            Cache from(source, num_tokens, random), to(target, num_tokens, random);
            const auto kv = random_kv(source, num_tokens, random);
            from.write(kernel, threads, kv, num_tokens);
            const std::int32_t counts[] = {block_tokens, block_tokens, num_tokens - 2 * block_tokens};
            copy_blocks(kernel, source.heads, threads,
                        {source.shape(), target.shape(), 1, from.num_blocks(), to.num_blocks(), 3, from.table().data(),
                         to.table().data(), counts},
                        from.blocks(), to.blocks());
            std::vector<float> numbers;
            for (std::int32_t t = 0; t < num_tokens; ++t)
                for (int value = 0; value < 2; ++value)
                    for (std::int32_t h = 0; h < 2; ++h)
                        for (std::int32_t d = 0; d < head_dim; ++d)
                            numbers.push_back(static_cast<float>(from.number(t, value, h, d)));
            const std::string text = target.text(kernel.name) + ", copied from " + name_of(from_dtype);
            check_written(text, target, to, encode(DType::fp32, numbers), num_tokens);
        }
}

}  // namespace

int main() {
    ThreadPool alone(1), threads(3);
    alone.resize();
    threads.resize();
    for (const Kernel* kernel : compiled_kernels()) {
        const auto& runnable = runnable_kernels();
        if (std::find(runnable.begin(), runnable.end(), kernel) == runnable.end()) {
            std::fprintf(stderr, "NOT TESTED: this processor has no %s\n", kernel->name);
            continue;
        }
        std::fprintf(stderr, "attention kernels tested: %s\n", kernel->name);
        test_every_type_and_dimension(*kernel, alone);
        test_head_ratios_and_blocks(*kernel, alone);
        test_long_contexts(*kernel, threads);
        test_int8_is_rounded_as_by_the_scalar_kernel(*kernel, alone);
        test_numbers_at_the_edge_of_their_type(*kernel, alone);
        test_nan_and_infinity(*kernel, alone);
        test_copies_between_types(*kernel, alone);
    }
}
