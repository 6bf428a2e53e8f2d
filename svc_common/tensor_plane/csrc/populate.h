// Gives a fresh shared mapping its memory, where and in which pages it is best read.
#pragma once

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

namespace neoflex {

#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // since Linux 5.14; older C libraries lack the name
#endif

// Touches [begin, begin + num_bytes) of a mapping; 0 or an errno. Unlike a plain write, which ends the process where
// the file system is full.
inline int touch(std::byte* begin, std::size_t num_bytes) {
    while (madvise(begin, num_bytes, MADV_POPULATE_WRITE) != 0)
        if (errno != EINTR && errno != EAGAIN) return errno == EFAULT ? ENOSPC : errno;
    return 0;
}

// Fills a mapping with zeroed pages, huge ones where the kernel gives them for the asking. By as many threads as there
// are `cpus`, each on one of them: a page lies in the memory next to the CPU that touched it first. 0 or an errno;
// EINVAL where the kernel does not know how.
inline int populate(std::byte* base, std::size_t num_bytes, const std::vector<int>& cpus) {
    constexpr std::size_t part_bytes = std::size_t{32} << 20;
    // A wish: most systems grant it for no shared memory at all.
    madvise(base, num_bytes, MADV_HUGEPAGE);
    std::atomic<std::size_t> next_part{0};
    std::atomic<int> failure{0};
    auto touch_parts = [&](const cpu_set_t* cpu) {
        if (cpu != nullptr) sched_setaffinity(0, sizeof *cpu, cpu);
        for (;;) {
            const std::size_t begin = next_part.fetch_add(1) * part_bytes;
            if (begin >= num_bytes || failure.load() != 0) return;
            if (const int error = touch(base + begin, std::min(part_bytes, num_bytes - begin))) failure.store(error);
        }
    };
    std::vector<cpu_set_t> sets(cpus.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < cpus.size(); ++i) {
        CPU_ZERO(&sets[i]);
        CPU_SET(cpus[i], &sets[i]);
        threads.emplace_back(touch_parts, &sets[i]);
    }
    if (threads.empty()) touch_parts(nullptr);
    for (auto& thread : threads) thread.join();
    return failure.load();
}

}  // namespace neoflex
