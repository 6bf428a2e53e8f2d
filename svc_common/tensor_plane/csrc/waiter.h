// How to wait for a doorbell: spin where the ring comes soon, sleep where it does not, and learn which it is.
//
// Waking a sleeper costs tens of microseconds, several layers' worth of what it waits for; spinning costs a core. The
// waits of one place are alike, so their recent lengths say where the next ring will fall. If that window is narrow
// enough the waiter naps until just before it and spins through it; else it sleeps at once, since a spin that ends
// before the ring gains nothing.
//
// A wait spins for at most `most_spin`, and only where recent waits would have ended within it. A spinner lets others
// run on its core every few microseconds, and stops spinning for a while where somebody does.
//
// A device that rings wakes nobody: who waits for it looks again and again, ever more rarely the longer it takes.
#pragma once

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "doorbell.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace neoflex {

inline void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

enum class WaitResult { reached, timed_out, interrupted };

// Who rings: a thread, which wakes sleepers, or a device, which can't.
enum class Ringer { thread, device };

// Used by one thread at a time, for waits that are alike.
class Waiter {
  public:
    // A sleeper looks up this often: for a dead peer, and for a wake that got lost with its sender.
    static constexpr nanoseconds sleep_slice = std::chrono::milliseconds(20);
    static constexpr nanoseconds most_spin = std::chrono::microseconds(500);

    // Waits until the bell reaches `target`. `interrupted(slept_a_slice)` ends the wait by returning true; it is
    // called before each sleep, with true after a slice of sleep passed without a ring: the moment for costly checks.
    template <typename Interrupted>
    WaitResult wait(Doorbell& bell, std::uint32_t target, Clock::time_point deadline, Interrupted&& interrupted,
                    Ringer ringer = Ringer::thread) {
        if (bell.reached(target)) return WaitResult::reached;
        const auto start = Clock::now();
        const Window window = next_window();
        if (window.begin > nanoseconds::zero() && !interrupted(false)) nap(bell, target, start + window.begin, deadline);
        // A nap may be cut short, by a nudge say.
        const auto spin_end = std::min(start + window.end, Clock::now() + most_spin);
        if (!spin(bell, target, std::min(spin_end, deadline))) {
            const WaitResult end = ringer == Ringer::thread ? sleep(bell, target, deadline, interrupted)
                                                            : look(bell, target, deadline, interrupted);
            if (end != WaitResult::reached) return end;
        }
        gaps_[num_gaps_++ % gaps_.size()] = Clock::now() - start;
        return WaitResult::reached;
    }

  private:
    // When to spin, counted from the start of the wait. Empty: not at all.
    struct Window {
        nanoseconds begin;
        nanoseconds end;
    };

    // Between two looks at whether somebody else wants this core.
    static constexpr nanoseconds yield_period = std::chrono::microseconds(4);
    // A yield that takes longer let somebody else run; one that finds nobody takes some 0.5 us. A single long one may
    // be an interrupt, so several in a row make a crowd.
    static constexpr nanoseconds long_yield = std::chrono::microseconds(2);
    static constexpr int crowd = 3;
    static constexpr std::uint32_t most_skipped = 32;
    // What comes later than this after a nap was not the wake-up but somebody else on the core.
    static constexpr nanoseconds most_oversleep = std::chrono::microseconds(100);
    // Between two looks at a number that a device writes: an eighth of the time that it has taken so far, within these.
    static constexpr nanoseconds least_pause = std::chrono::microseconds(10);
    static constexpr nanoseconds most_pause = std::chrono::microseconds(80);

    Window next_window() {
        if (skip_ > 0) {
            --skip_;
            return {};
        }
        auto sorted = gaps_;
        std::sort(sorted.begin(), sorted.end());
        // Without the extremes: one wait that was unlike the others, such as an iteration's first, changes nothing.
        const nanoseconds early = sorted[1];
        const nanoseconds late = sorted[sorted.size() - 2];
        const nanoseconds end = late + (late - early) / 2 + std::chrono::microseconds(3);
        if (end <= most_spin) return {nanoseconds::zero(), end};
        const nanoseconds begin = early - 2 * oversleep_;
        if (end - begin <= most_spin && begin < sleep_slice) return {begin, end};
        return {};
    }

    // The kernel may prolong a sleep by a thread's slack, 50 us unless told otherwise.
    static void set_timer_slack() {
        static thread_local const int slack_set = prctl(PR_SET_TIMERSLACK, 1000UL);
        static_cast<void>(slack_set);
    }

    void nap(Doorbell& bell, std::uint32_t target, Clock::time_point until, Clock::time_point deadline) {
        set_timer_slack();
        const std::uint32_t seen = bell.number.load(std::memory_order_relaxed);
        const nanoseconds limit = std::min(until, deadline) - Clock::now();
        if (limit <= nanoseconds::zero() || bell.reached(target)) return;
        bell.sleep(seen, limit);
        const nanoseconds over = Clock::now() - until;
        if (over > nanoseconds::zero()) oversleep_ += (std::min(over, most_oversleep) - oversleep_) / 8;
    }

    bool spin(const Doorbell& bell, std::uint32_t target, Clock::time_point end) {
        auto yielded = Clock::now();
        for (auto now = yielded; now < end; now = Clock::now()) {
            for (int i = 0; i < 16; ++i) {
                if (bell.reached(target)) return spin_paid();
                pause_cpu();
            }
            if (now - yielded < yield_period) continue;
            sched_yield();
            yielded = Clock::now();
            long_yields_ = yielded - now > long_yield ? long_yields_ + 1 : 0;
            if (long_yields_ == crowd) {
                long_yields_ = 0;
                skip_ = crowded_;
                crowded_ = std::min(2 * crowded_, most_skipped);
                return bell.reached(target);
            }
        }
        return bell.reached(target);
    }

    bool spin_paid() {
        if (long_yields_ == 0) crowded_ = 1;
        return true;
    }

    template <typename Interrupted>
    static WaitResult sleep(Doorbell& bell, std::uint32_t target, Clock::time_point deadline,
                            Interrupted&& interrupted) {
        bool slept_a_slice = false;
        // The number first: where it changes after the look at it, the sleep does not begin.
        for (;;) {
            const std::uint32_t seen = bell.number.load(std::memory_order_relaxed);
            if (bell.reached(target)) return WaitResult::reached;
            if (interrupted(slept_a_slice)) return WaitResult::interrupted;
            const auto start = Clock::now();
            if (start >= deadline) return WaitResult::timed_out;
            bell.sleep(seen, std::min<nanoseconds>(sleep_slice, deadline - start));
            slept_a_slice = Clock::now() - start >= sleep_slice;
        }
    }

    // `sleep` for a number that changes without a wake. A nudge ends a pause, as it does a sleep.
    template <typename Interrupted>
    static WaitResult look(Doorbell& bell, std::uint32_t target, Clock::time_point deadline,
                           Interrupted&& interrupted) {
        set_timer_slack();
        const auto start = Clock::now();
        auto checked = start;
        for (auto now = start;; now = Clock::now()) {
            const std::uint32_t seen = bell.number.load(std::memory_order_relaxed);
            if (bell.reached(target)) return WaitResult::reached;
            const bool slept_a_slice = now - checked >= sleep_slice;
            if (slept_a_slice) checked = now;
            if (interrupted(slept_a_slice)) return WaitResult::interrupted;
            if (now >= deadline) return WaitResult::timed_out;
            const auto pause = std::clamp<nanoseconds>((now - start) / 8, least_pause, most_pause);
            bell.sleep(seen, std::min<nanoseconds>(pause, deadline - now));
        }
    }

    std::array<nanoseconds, 8> gaps_{};  // the last waits, ring-wise
    std::size_t num_gaps_ = 0;
    nanoseconds oversleep_ = most_oversleep / 2;  // beyond a nap's end, on average
    int long_yields_ = 0;        // the last so many were
    std::uint32_t skip_ = 0;     // waits that do not spin, since the core is wanted by others
    std::uint32_t crowded_ = 1;  // how many the next crowd lets skip
};

}  // namespace neoflex
