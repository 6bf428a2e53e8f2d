// What this machine's memory and arithmetic give at most: the floor that attention's time is compared with.
#pragma once

#include <cstddef>

#include "kernel.h"
#include "thread_pool.h"

namespace neoflex {

// Bytes per second of reading `memory` once, front to end, by all threads; the best of `num_rounds`. The caller gives
// more than the caches hold.
double read_ceiling(const Kernel& kernel, ThreadPool& threads, const std::byte* memory, std::size_t num_bytes,
                    int num_rounds);

// Fused multiply-adds per second of fp32 in registers, all threads; the best of `num_rounds`.
double fma_peak(const Kernel& kernel, ThreadPool& threads, int num_rounds);

}  // namespace neoflex
