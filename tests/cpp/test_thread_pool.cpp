// Each task of each run is done once, by a thread of the pool, whatever is resized meanwhile.
#include <sched.h>

#include <numeric>
#include <random>

#include "check.h"
#include "thread_pool.h"

using namespace neoflex;

namespace {

// One run; plain counters show that run() waits for the last task and that none is done twice.
void check_run(ThreadPool& threads, int num_threads, std::uint32_t num_tasks, bool wake_helpers) {
    std::vector<int> times_done(num_tasks), done_by(num_tasks);
    threads.run(num_tasks, wake_helpers, [&](std::uint32_t task, int thread) {
        times_done[task] += 1;
        done_by[task] = thread;
    });
    for (std::uint32_t task = 0; task < num_tasks; ++task) {
        CHECK(times_done[task] == 1);
        CHECK(done_by[task] >= 0 && done_by[task] < num_threads);
        CHECK(wake_helpers || done_by[task] == 0);
    }
}

void test_runs_back_to_back() {
    ThreadPool threads(3);
    CHECK(threads.resize() == 3);
    std::minstd_rand random(1);
    for (int i = 0; i < 5000; ++i) check_run(threads, 3, random() % 8, i % 5 != 0);
}

void test_resized_between_runs_from_another_thread() {
    ThreadPool threads(1);
    std::atomic<bool> stop{false};
    std::thread other([&] {
        std::minstd_rand random(2);
        while (!stop.load()) {
            threads.set_num_threads(1 + static_cast<int>(random() % 4));
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    });
    for (int i = 0; i < 300; ++i) {
        const int num_threads = threads.resize();
        for (int run = 0; run < 5; ++run) check_run(threads, num_threads, 6, true);
    }
    stop.store(true);
    other.join();
}

void test_helpers_that_slept_come_back() {
    ThreadPool threads(3);
    threads.resize();
    for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        // All threads must take part: each task waits for the others.
        std::atomic<int> num_arrived{0};
        threads.run(3, true, [&](std::uint32_t, int) {
            num_arrived.fetch_add(1);
            while (num_arrived.load() < 3) sched_yield();
        });
        CHECK(num_arrived.load() == 3);
    }
}

// The last CPU of a thread's affinity, and that it has no other.
int only_cpu() {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    if (CPU_COUNT(&set) != 1) return -1;
    int cpu = 0;
    while (!CPU_ISSET(cpu, &set)) ++cpu;
    return cpu;
}

void test_threads_stay_on_their_cpus() {
    cpu_set_t before;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before)) ++cpu;
    {
        ThreadPool threads(3, {cpu, cpu});  // the third is not pinned by the pool
        threads.resize();
        CHECK(only_cpu() == cpu);
        std::atomic<int> num_arrived{0};
        int cpus[3] = {};
        threads.run(3, true, [&](std::uint32_t, int thread) {
            cpus[thread] = only_cpu();
            num_arrived.fetch_add(1);
            while (num_arrived.load() < 3) sched_yield();
        });
        CHECK(cpus[0] == cpu && cpus[1] == cpu);
        // The third goes where this thread might before it was pinned.
        CHECK(cpus[2] == -1 || CPU_COUNT(&before) == 1);
    }
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}

}  // namespace

int main() {
    test_runs_back_to_back();
    test_resized_between_runs_from_another_thread();
    test_helpers_that_slept_come_back();
    test_threads_stay_on_their_cpus();
}
