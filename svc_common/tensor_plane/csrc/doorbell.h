// Doorbells: how two processes (or the threads of one) tell each other that something is ready.
//
// A doorbell is a 32-bit number that only grows, modulo 2^32. The writer stores it with release order and
// enters the kernel only where somebody sleeps; the waiter spins for a bounded time and then sleeps on the word.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace neoflex {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

// A sleeper looks up this often: for a dead peer, and for a wake that got lost with its sender.
inline constexpr nanoseconds sleep_slice = std::chrono::milliseconds(20);

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

inline void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
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
        number.store(value, std::memory_order_release);
        // Orders the store before the look at the sleepers; the sleeper does the same the other way round, so
        // one of the two sees the other.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (num_sleepers.load(std::memory_order_relaxed) != 0) futex_wake_all(number);
    }

    // Lets sleepers look at whatever else they watch.
    void nudge() { futex_wake_all(number); }
};

// How long to spin before sleeping. Grows while spinning pays, shrinks when it does not: where both processes
// share few cores a spinner takes the very core that it waits for.
class SpinBudget {
  public:
    nanoseconds value() const { return budget_; }
    void paid() { budget_ = std::min(budget_ * 2, most); }
    void wasted() { budget_ = std::max(budget_ / 2, least); }

  private:
    static constexpr nanoseconds least = std::chrono::microseconds(2);
    static constexpr nanoseconds most = std::chrono::microseconds(50);
    nanoseconds budget_ = std::chrono::microseconds(10);
};

enum class WaitResult { reached, timed_out, interrupted };

inline bool spin_until_reached(const Doorbell& bell, std::uint32_t target, nanoseconds budget) {
    const auto end = Clock::now() + budget;
    do {
        for (int i = 0; i < 8; ++i) {
            if (bell.reached(target)) return true;
            pause_cpu();
        }
    } while (Clock::now() < end);
    return false;
}

// Waits until the bell reaches `target`. `interrupted(slept_a_slice)` ends the wait by returning true; it is called
// before each sleep, with true after a slice of sleep passed without a ring: the moment for costly checks.
template <typename Interrupted>
WaitResult wait_for(Doorbell& bell, std::uint32_t target, SpinBudget& spin, Clock::time_point deadline,
                    Interrupted&& interrupted) {
    if (bell.reached(target)) return WaitResult::reached;
    if (spin_until_reached(bell, target, spin.value())) {
        spin.paid();
        return WaitResult::reached;
    }
    spin.wasted();
    bool slept_a_slice = false;
    while (!bell.reached(target)) {
        if (interrupted(slept_a_slice)) return WaitResult::interrupted;
        const auto start = Clock::now();
        if (start >= deadline) return WaitResult::timed_out;
        const std::uint32_t seen = bell.number.load(std::memory_order_relaxed);
        bell.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (bell.number.load(std::memory_order_relaxed) == seen && !bell.reached(target)) {
            futex_sleep(bell.number, seen, std::min<nanoseconds>(sleep_slice, deadline - start));
        }
        bell.num_sleepers.fetch_sub(1, std::memory_order_relaxed);
        slept_a_slice = Clock::now() - start >= sleep_slice;
    }
    return WaitResult::reached;
}

}  // namespace neoflex
