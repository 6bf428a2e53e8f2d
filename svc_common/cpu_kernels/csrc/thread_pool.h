// The calling thread and its helpers: run(n, f) calls f(task, thread) for each task in [0, n), then returns.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "waiter.h"

namespace neoflex {

class ThreadPool {
  public:
    // Thread i stays on CPU cpus[i]; threads beyond the list, or all with an empty one, go where the kernel puts them.
    explicit ThreadPool(int num_threads, std::vector<int> cpus = {});
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // How many threads compute from the next resize() on, the caller of run() included. From any thread.
    // Throws std::invalid_argument below 1.
    void set_num_threads(int num_threads);
    int num_threads() const { return wanted_.load(std::memory_order_relaxed); }

    // Starts or ends helpers so that num_threads() compute, and returns that. By the caller of run(), between runs; the
    // caller is thread 0 and pinned like the others.
    int resize();
    // By the caller of run(): threads that compute now.
    int num_running() const { return static_cast<int>(helpers_.size()) + 1; }

    // One caller at a time. `f` must not throw. Helpers are woken only with `wake_helpers`: for little work that
    // takes longer than the work.
    template <typename F>
    void run(std::uint32_t num_tasks, bool wake_helpers, F&& f) {
        if (!wake_helpers || helpers_.empty() || num_tasks < 2) {
            for (std::uint32_t task = 0; task < num_tasks; ++task) f(task, 0);
            return;
        }
        call_ = [](void* context, std::uint32_t task, int thread) {
            (*static_cast<std::remove_reference_t<F>*>(context))(task, thread);
        };
        context_ = &f;
        run_with_helpers(num_tasks);
    }

  private:
    struct Helper {
        std::atomic<bool> stop{false};
        std::thread thread;
    };

    void run_with_helpers(std::uint32_t num_tasks);
    void help(const Helper& self, int thread, std::uint32_t seen);
    void take_tasks(int thread);
    void end_helpers(std::size_t num_kept);
    void pin_this_thread(int thread) const;

    std::atomic<int> wanted_{1};
    const std::vector<int> cpus_;
    cpu_set_t unpinned_;  // where threads may run that are not in the list
    std::thread::id caller_;  // the last that was pinned
    std::vector<std::unique_ptr<Helper>> helpers_;  // thread numbers 1, 2, ...

    // The job. Written by run() only while no task is open, and read only after a task was taken.
    void (*call_)(void*, std::uint32_t, int) = nullptr;
    void* context_ = nullptr;
    // Upper half: number of the job; lower half: its next task. A helper that comes late finds the number changed.
    static constexpr std::uint64_t shut = ~std::uint64_t{0};
    alignas(64) std::atomic<std::uint64_t> ticket_{shut};
    std::atomic<std::uint32_t> num_tasks_{0};
    Doorbell start_;     // rung with the number of the job
    Doorbell all_done_;  // likewise
    alignas(64) std::atomic<std::uint32_t> num_done_{0};
    std::uint32_t job_ = 0;
    Waiter join_waiter_;
};

}  // namespace neoflex
