// Python's view of the worker: one call per iteration.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>

#include "arrays.h"
#include "worker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neoflex {
namespace {

// slot, first_submit, context_tokens, block_tables
using SubBatchArrays = std::tuple<int, std::uint32_t, Int32Vector, Int32Matrix>;

using Times = std::tuple<std::uint64_t, std::uint64_t, std::vector<std::uint64_t>>;

Times run_iteration(Worker& worker, const std::vector<SubBatchArrays>& arrays, std::int32_t first_layer,
                    std::int32_t num_layers, bool trace) {
    std::vector<SubBatch> sub_batches;
    for (const auto& [slot, first_submit, context_tokens, block_tables] : arrays)
        sub_batches.push_back({slot, first_submit, make_batch(context_tokens, block_tables)});
    nb::gil_scoped_release release;
    IterationTimes times = worker.run(sub_batches, {first_layer, num_layers}, trace);
    return {times.compute_ns, times.wait_ns, std::move(times.trace_ns)};
}

}  // namespace
}  // namespace neoflex

NB_MODULE(_attention, m) {
    using namespace neoflex;
    m.doc() = "Decode attention over a region. Regions come from svc_common.tensor_plane, threads from svc_common.cpu_kernels.";
    nb::exception<Interrupted>(m, "InterruptedIterationError");
    nb::class_<Worker>(m, "Worker", "Computes iterations over one region.")
        .def(
            "__init__",
            [](Worker* self, Region& region, const std::string& instruction_set, ThreadPool& threads) {
                new (self) Worker(region, choose_kernel(instruction_set), threads);
            },
            "region"_a, "instruction_set"_a, "threads"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(),
            nb::sig("def __init__(self, region: svc_common.tensor_plane._plane.Region, instruction_set: str, "
                    "threads: svc_common.cpu_kernels._kernels.ThreadPool) -> None"))
        .def("run", &run_iteration, "sub_batches"_a, "first_layer"_a, "num_layers"_a, "trace"_a,
             nb::sig("def run(self, sub_batches: list[tuple[int, int, numpy.typing.NDArray[numpy.int32], "
                     "numpy.typing.NDArray[numpy.int32]]], first_layer: int, num_layers: int, trace: bool) -> "
                     "tuple[int, int, list[int]]"),
             "Some layers of (slot, first_submit, context_tokens, block_tables) in the order in which each layer\n"
             "submits them. Returns (compute_ns, wait_ns, trace_ns); the last is empty unless `trace`.")
        .def("cancel", &Worker::cancel, "Ends the running iteration, and each later one, at its next wait.");
}
