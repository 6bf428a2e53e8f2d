// Python's view of the kernels: the thread pool they run on, which of them run here, what they do.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attention_bindings.h"
#include "kernels.h"
#include "linear_module.h"
#include "measure.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neoflex {
namespace {

using Memory = nb::ndarray<const std::uint8_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

std::vector<std::string> names_of(const std::vector<const Kernel*>& kernels) {
    std::vector<std::string> names;
    for (const Kernel* kernel : kernels) names.emplace_back(kernel->name);
    return names;
}

std::vector<std::int64_t> fork_join_ns(ThreadPool& threads, std::size_t num_runs) {
    const auto num_tasks = static_cast<std::uint32_t>(threads.resize());
    std::vector<std::int64_t> times(num_runs);
    for (std::int64_t& time : times) {
        const auto start = Clock::now();
        std::atomic<std::uint32_t> num_arrived{0};
        threads.run(num_tasks, true, [&](std::uint32_t, int) {
            num_arrived.fetch_add(1);
            // Threads that share a core meet only where they let each other run.
            for (int i = 1; num_arrived.load() < num_tasks; ++i) i % 1024 == 0 ? void(sched_yield()) : pause_cpu();
        });
        time = nanoseconds(Clock::now() - start).count();
    }
    return times;
}

}  // namespace
}  // namespace neoflex

NB_MODULE(_kernels, m) {
    using namespace neoflex;
    m.doc() = "What runs on the CPU at its full speed.";
    nb::class_<ThreadPool>(m, "ThreadPool", "Threads that compute, the caller's included.")
        .def(nb::init<int, std::vector<int>>(), "num_threads"_a, "cpus"_a = std::vector<int>{},
             "Thread i, the caller's being 0, stays on CPU cpus[i]; those beyond the list are not pinned.")
        .def("fork_join_ns", &fork_join_ns, "num_runs"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Nanoseconds of each of so many runs, one right after the other, in which all threads meet.")
        .def_prop_rw("num_threads", &ThreadPool::num_threads, &ThreadPool::set_num_threads,
                     "A change takes effect with the next iteration.");
    m.def("compiled_instruction_sets", [] { return names_of(compiled_kernels()); },
          "Names, slowest first; some may not run here.");
    m.def("runnable_instruction_sets", [] { return names_of(runnable_kernels()); }, "Names, slowest first.");
    m.def(
        "choose_instruction_set", [](const std::string& wanted) { return std::string(choose_kernel(wanted).name); },
        "wanted"_a, "The fastest for \"auto\". Raises ValueError where the wanted one does not run here.");
    m.def(
        "read_ceiling",
        [](ThreadPool& threads, const Memory& memory, int num_rounds) {
            nb::gil_scoped_release release;
            return read_ceiling(choose_kernel("auto"), threads, reinterpret_cast<const std::byte*>(memory.data()),
                                memory.size(), num_rounds);
        },
        "threads"_a, "memory"_a, "num_rounds"_a,
        nb::sig("def read_ceiling(threads: ThreadPool, memory: numpy.typing.NDArray[numpy.uint8], num_rounds: int) "
                "-> float"),
        "Bytes per second of a plain read of memory, front to end, all threads; the best round.");
    m.def(
        "fma_peak",
        [](ThreadPool& threads, int num_rounds) { return fma_peak(choose_kernel("auto"), threads, num_rounds); },
        "threads"_a, "num_rounds"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Fused multiply-adds of fp32 per second, all threads; the best round.");
    bind_attention(m);
    bind_linear(m);
}
