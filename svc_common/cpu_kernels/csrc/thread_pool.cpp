#include "thread_pool.h"

#include <stdexcept>
#include <utility>

namespace neoflex {

ThreadPool::ThreadPool(int num_threads, std::vector<int> cpus) : cpus_(std::move(cpus)) {
    set_num_threads(num_threads);
    CPU_ZERO(&unpinned_);
    sched_getaffinity(0, sizeof unpinned_, &unpinned_);
}

ThreadPool::~ThreadPool() { end_helpers(0); }

void ThreadPool::set_num_threads(int num_threads) {
    if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
    wanted_.store(num_threads, std::memory_order_relaxed);
}

int ThreadPool::resize() {
    const int wanted = num_threads();
    if (caller_ != std::this_thread::get_id()) {
        caller_ = std::this_thread::get_id();
        pin_this_thread(0);
    }
    const std::size_t num_helpers = static_cast<std::size_t>(wanted - 1);
    end_helpers(num_helpers);
    while (helpers_.size() < num_helpers) {
        // The thread first: where none can be had, nothing of it is left.
        helpers_.reserve(num_helpers);
        auto helper = std::make_unique<Helper>();
        helper->thread = std::thread(
            [this, self = helper.get(), thread = num_running(), seen = job_] { help(*self, thread, seen); });
        helpers_.push_back(std::move(helper));
    }
    return wanted;
}

void ThreadPool::end_helpers(std::size_t num_kept) {
    for (std::size_t i = num_kept; i < helpers_.size(); ++i) helpers_[i]->stop.store(true);
    start_.nudge();
    while (helpers_.size() > num_kept) {
        helpers_.back()->thread.join();
        helpers_.pop_back();
    }
}

// Best effort: a CPU that is gone by now leaves the thread where it may run. A thread begins where the one that made it
// is pinned, so those beyond the list are let go again.
void ThreadPool::pin_this_thread(int thread) const {
    if (cpus_.empty()) return;
    cpu_set_t set = unpinned_;
    if (static_cast<std::size_t>(thread) < cpus_.size()) {
        CPU_ZERO(&set);
        CPU_SET(cpus_[thread], &set);
    }
    sched_setaffinity(0, sizeof set, &set);
}

void ThreadPool::run_with_helpers(std::uint32_t num_tasks) {
    ++job_;
    num_done_.store(0, std::memory_order_relaxed);
    // Shut before the number changes: a late helper that reads the new number can't take the old job's next task.
    ticket_.store(shut, std::memory_order_relaxed);
    num_tasks_.store(num_tasks, std::memory_order_release);
    ticket_.store(static_cast<std::uint64_t>(job_) << 32, std::memory_order_release);
    start_.ring(job_);
    take_tasks(0);
    // Helpers that still compute ring; those that never woke up have nothing left to take.
    join_waiter_.wait(all_done_, job_, Clock::time_point::max(), [](bool) { return false; });
}

void ThreadPool::take_tasks(int thread) {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
        const auto task = static_cast<std::uint32_t>(ticket);
        const std::uint32_t num_tasks = num_tasks_.load(std::memory_order_acquire);
        if (task >= num_tasks) return;
        // Fails where another took this task, or where the job is another by now.
        if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
            continue;
        call_(context_, task, thread);
        const auto job = static_cast<std::uint32_t>(ticket >> 32);
        if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_tasks) all_done_.ring(job);
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

void ThreadPool::help(const Helper& self, int thread, std::uint32_t seen) {
    pin_this_thread(thread);
    Waiter waiter;
    auto stopped = [&](bool) { return self.stop.load(); };
    while (waiter.wait(start_, seen + 1, Clock::time_point::max(), stopped) == WaitResult::reached) {
        seen = start_.number.load(std::memory_order_acquire);
        take_tasks(thread);
    }
}

}  // namespace neoflex
