// Doorbells and waiters between threads: wrap-around, lost wakes, and every way a wait ends.
#include <random>
#include <thread>

#include "check.h"
#include "waiter.h"

using namespace neoflex;

namespace {

constexpr auto never = [](bool) { return false; };
constexpr auto forever = Clock::time_point::max();
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

void test_reached_is_half_the_circle() {
    Doorbell bell;
    bell.ring(5);
    CHECK(bell.reached(5));
    CHECK(bell.reached(4));
    CHECK(!bell.reached(6));
    CHECK(bell.reached(5u - 0x7fffffffu));
    CHECK(!bell.reached(5u + 0x7fffffffu));
    bell.ring(2);  // after a wrap
    CHECK(bell.reached(0xfffffff0u));
}

// Two threads answer each other, with pauses that let either one spin, nap or sleep.
void test_no_ring_is_lost(std::uint32_t first, int num_rounds, int longest_pause_us) {
    Doorbell there, back;
    there.ring(first);
    back.ring(first);
    std::uint32_t plain = first;  // handed to and fro without a lock: the doorbells order the accesses
    auto side = [&](Doorbell& mine, Doorbell& theirs, bool starts, unsigned seed) {
        Waiter waiter;
        std::minstd_rand random(seed);
        for (int i = 1; i <= num_rounds; ++i) {
            const std::uint32_t number = first + static_cast<std::uint32_t>(i);
            if (!starts) {
                CHECK(waiter.wait(theirs, number, Clock::now() + seconds(60), never) == WaitResult::reached);
                CHECK(plain == number);
            } else {
                plain = number;
            }
            if (longest_pause_us > 0 && random() % 4 == 0)
                std::this_thread::sleep_for(microseconds(random() % static_cast<unsigned>(longest_pause_us)));
            mine.ring(number);
            if (starts) {
                CHECK(waiter.wait(theirs, number, Clock::now() + seconds(60), never) == WaitResult::reached);
            }
        }
    };
    std::thread other([&] { side(back, there, false, 1); });
    side(there, back, true, 2);
    other.join();
    CHECK(there.num_sleepers.load() == 0 && back.num_sleepers.load() == 0);
}

// Rings that fall around the moment at which the other side goes to sleep; a wake that is lost would last ten seconds.
void test_no_wake_is_lost() {
    Doorbell bell;
    std::atomic<std::uint32_t> round{0};
    constexpr std::uint32_t num_rounds = 20000;
    auto meet = [&](std::uint32_t arrivals) {
        round.fetch_add(1);
        // Both leave within nanoseconds where each has a core.
        for (int i = 1; round.load() < arrivals; ++i) i % 4096 == 0 ? void(sched_yield()) : pause_cpu();
    };
    auto dawdle = [](std::minstd_rand& random) {
        for (auto i = random() % 64; i > 0; --i) pause_cpu();
    };
    const auto start = Clock::now();
    std::thread ringer([&] {
        std::minstd_rand random(1);
        for (std::uint32_t i = 1; i <= num_rounds; ++i) {
            meet(2 * i);
            dawdle(random);
            bell.ring(i);
        }
    });
    std::minstd_rand random(2);
    for (std::uint32_t i = 1; i <= num_rounds; ++i) {
        meet(2 * i);
        dawdle(random);
        while (!bell.reached(i)) bell.sleep(i - 1, seconds(10));
    }
    ringer.join();
    CHECK(Clock::now() - start < seconds(10));
}

void test_many_sleepers_wake() {
    Doorbell bell;
    std::vector<std::thread> sleepers;
    for (int i = 0; i < 8; ++i)
        sleepers.emplace_back([&] {
            Waiter waiter;
            for (std::uint32_t number = 1; number <= 50; ++number)
                CHECK(waiter.wait(bell, number, Clock::now() + seconds(60), never) == WaitResult::reached);
        });
    for (std::uint32_t number = 1; number <= 50; ++number) {
        std::this_thread::sleep_for(microseconds(200));
        bell.ring(number);
    }
    for (auto& sleeper : sleepers) sleeper.join();
}

void test_time_runs_out() {
    Doorbell bell;
    Waiter waiter;
    const auto start = Clock::now();
    CHECK(waiter.wait(bell, 1, start + milliseconds(50), never) == WaitResult::timed_out);
    CHECK(Clock::now() - start >= milliseconds(50));
    CHECK(waiter.wait(bell, 1, start, never) == WaitResult::timed_out);
    CHECK(waiter.wait(bell, 0, start, never) == WaitResult::reached);
}

// Costly checks come after a slice of sleep, cheap ones at once, and a nudge ends a sleep.
void test_interruption() {
    Doorbell bell;
    Waiter waiter;
    int num_slices = 0;
    auto after_two_slices = [&](bool slept_a_slice) { return (num_slices += slept_a_slice) == 2; };
    CHECK(waiter.wait(bell, 1, forever, after_two_slices) == WaitResult::interrupted);
    std::atomic<bool> stop{false};
    std::thread stopper([&] {
        std::this_thread::sleep_for(milliseconds(5));
        stop.store(true);
        bell.nudge();
    });
    CHECK(waiter.wait(bell, 1, forever, [&](bool) { return stop.load(); }) == WaitResult::interrupted);
    stopper.join();
}

// Regular waits of 3 ms are learned: the waiter naps, and is back before the ring or soon after it.
void test_regular_waits() {
    Doorbell bell;
    Waiter waiter;
    std::thread ringer([&] {
        for (std::uint32_t number = 1; number <= 40; ++number) {
            std::this_thread::sleep_for(milliseconds(3));
            bell.ring(number);
        }
    });
    for (std::uint32_t number = 1; number <= 40; ++number)
        CHECK(waiter.wait(bell, number, Clock::now() + seconds(60), never) == WaitResult::reached);
    ringer.join();
}

// Numbers that change without a wake, soon or late, are seen; a nudge and a peer's death still end the wait.
void test_a_device_rings() {
    Doorbell bell;
    Waiter waiter;
    auto wait = [&](std::uint32_t number, auto&& interrupted) {
        return waiter.wait(bell, number, Clock::now() + seconds(60), interrupted, Ringer::device);
    };
    std::thread device([&] {
        std::minstd_rand random(5);
        for (std::uint32_t number = 1; number <= 60; ++number) {
            std::this_thread::sleep_for(microseconds(random() % (number % 8 == 0 ? 30'000 : 300)));
            bell.number.store(number, std::memory_order_release);
        }
    });
    for (std::uint32_t number = 1; number <= 60; ++number) CHECK(wait(number, never) == WaitResult::reached);
    device.join();
    bell.reset();
    CHECK(wait(0, never) == WaitResult::reached);
    int num_slices = 0;
    CHECK(wait(1, [&](bool slept_a_slice) { return (num_slices += slept_a_slice) == 2; }) == WaitResult::interrupted);
    const auto start = Clock::now();
    CHECK(waiter.wait(bell, 1, start + milliseconds(30), never, Ringer::device) == WaitResult::timed_out);
    CHECK(Clock::now() - start >= milliseconds(30));
    std::atomic<bool> stop{false};
    std::thread stopper([&] {
        std::this_thread::sleep_for(milliseconds(5));
        stop.store(true);
        bell.nudge();
    });
    CHECK(wait(1, [&](bool) { return stop.load(); }) == WaitResult::interrupted);
    stopper.join();
}

}  // namespace

int main() {
    test_reached_is_half_the_circle();
    test_no_ring_is_lost(0, 20000, 0);
    test_no_ring_is_lost(0xffffff00u, 2000, 300);
    test_no_wake_is_lost();
    test_many_sleepers_wake();
    test_time_runs_out();
    test_interruption();
    test_regular_waits();
    test_a_device_rings();
}
