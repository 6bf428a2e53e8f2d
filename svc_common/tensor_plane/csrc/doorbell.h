// Doorbells: how two processes (or the threads of one) tell each other that something is ready.
//
// A doorbell is a 32-bit number that only grows, modulo 2^32. The writer stores it with release order and
// enters the kernel only where somebody sleeps. How to wait is in waiter.h.
//
// Where a device's stream writes and awaits the numbers, it does so at the doorbell's address, wakes nobody, and has
// them start from 0 in each iteration.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace neoflex {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

inline void futex_sleep(std::atomic<std::uint32_t>& word, std::uint32_t expected, nanoseconds limit) {
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
    timeout.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
    // Not FUTEX_PRIVATE: the word may be in memory that another process maps elsewhere.
    syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A cache line of its own, so that a spinning waiter disturbs nobody.
struct alignas(64) Doorbell {
    std::atomic<std::uint32_t> number{0};
    std::atomic<std::uint32_t> num_sleepers{0};

    // Numbers wrap: "reached" means at most half the circle ahead.
    bool reached(std::uint32_t target) const {
        return static_cast<std::int32_t>(number.load(std::memory_order_acquire) - target) >= 0;
    }

    void ring(std::uint32_t value) {
        // Ringer and sleeper each write, then look at what the other wrote, in one total order: one sees the other.
        number.store(value, std::memory_order_seq_cst);
        if (num_sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(number);
    }

    // Back to a number before any that is waited for. While nobody waits.
    void reset() { number.store(0, std::memory_order_release); }

    // Sleeps until the number is no longer `seen`, a nudge or the limit, or not at all where it has changed already.
    void sleep(std::uint32_t seen, nanoseconds limit) {
        num_sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (number.load(std::memory_order_seq_cst) == seen) futex_sleep(number, seen, limit);
        num_sleepers.fetch_sub(1, std::memory_order_relaxed);
    }

    // Lets sleepers look at whatever else they watch.
    void nudge() { futex_wake_all(number); }
};

}  // namespace neoflex
