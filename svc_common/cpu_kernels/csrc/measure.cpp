#include "measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace neoflex {

namespace {

constexpr std::size_t portion_bytes = 4 * 1024 * 1024;
constexpr std::int32_t peak_rounds = 1 << 20;

template <typename F>
double best_seconds(int num_rounds, F f) {
    double best = 0.0;
    for (int round = 0; round < num_rounds; ++round) {
        const auto start = std::chrono::steady_clock::now();
        f();
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = round == 0 ? seconds : std::min(best, seconds);
    }
    return best;
}

}  // namespace

double read_ceiling(const Kernel& kernel, ThreadPool& threads, const std::byte* memory, std::size_t num_bytes,
                    int num_rounds) {
    const auto num_portions = static_cast<std::uint32_t>((num_bytes + portion_bytes - 1) / portion_bytes);
    threads.resize();
    std::atomic<std::uint64_t> sum{0};
    const double seconds = best_seconds(num_rounds, [&] {
        threads.run(num_portions, true, [&](std::uint32_t portion, int) {
            const std::size_t start = portion * portion_bytes;
            const auto* words = reinterpret_cast<const std::uint64_t*>(memory + start);
            sum += kernel.read(words, std::min(portion_bytes, num_bytes - start) / sizeof(std::uint64_t));
        });
    });
    return static_cast<double>(num_bytes) / seconds;
}

double fma_peak(const Kernel& kernel, ThreadPool& threads, int num_rounds) {
    const auto num_tasks = 4 * static_cast<std::uint32_t>(threads.resize());
    float sink;
    const double per_task = kernel.multiply_add(peak_rounds, &sink);
    const double seconds = best_seconds(num_rounds, [&] {
        threads.run(num_tasks, true, [&](std::uint32_t, int) {
            float own_sink;
            kernel.multiply_add(peak_rounds, &own_sink);
        });
    });
    return num_tasks * per_task / seconds;
}

}  // namespace neoflex
