// Python's view of the worker: one call per iteration.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
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

// first_row, num_layers, chunk_starts, chunk_tokens, context_tokens, block_tables, rotations as addresses
using LayerBatchArrays = std::tuple<std::int32_t, std::int32_t, Int32Vector, Int32Vector, Int32Vector, Int32Matrix,
                                    std::vector<std::tuple<std::uintptr_t, std::uintptr_t>>>;

using Times = std::tuple<std::uint64_t, std::uint64_t, std::vector<std::array<std::uint64_t, 4>>>;

LayerBatch layer_batch_of(const LayerBatchArrays& arrays) {
    const auto& [first_row, num_layers, starts, tokens, contexts, tables, rotations] = arrays;
    const std::size_t num_chunks = starts.shape(0);
    if (tokens.shape(0) != num_chunks || tables.shape(0) != num_chunks + contexts.shape(0))
        throw nb::value_error("a batch's arrays differ in length");
    const auto stride = static_cast<std::int32_t>(tables.shape(1));
    LayerBatch batch{first_row, num_layers, {}, {}, stride, {}};
    for (std::size_t i = 0; i < num_chunks; ++i)
        batch.chunks.push_back({starts.data()[i], tokens.data()[i], tables.data() + i * tables.shape(1)});
    batch.decodes = {static_cast<std::int32_t>(contexts.shape(0)), contexts.data(),
                     tables.data() + num_chunks * tables.shape(1), stride};
    for (const auto& [cos, sin] : rotations)
        batch.rotations.push_back({reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin)});
    return batch;
}

Times run_iteration(Worker& worker, const std::vector<SubBatchArrays>& arrays, std::int32_t first_layer,
                    std::int32_t num_layers, bool in_turn, bool device_rings, bool trace, std::uint32_t first_batch,
                    const std::vector<LayerBatchArrays>& batches) {
    LayerWork work{first_batch, {}};
    for (const LayerBatchArrays& batch : batches) work.batches.push_back(layer_batch_of(batch));
    std::vector<SubBatch> sub_batches;
    for (const auto& [slot, first_submit, context_tokens, block_tables] : arrays)
        sub_batches.push_back({slot, first_submit, make_batch(context_tokens, block_tables)});
    nb::gil_scoped_release release;
    const Ringer ringer = device_rings ? Ringer::device : Ringer::thread;
    IterationTimes times = worker.run(sub_batches, {first_layer, num_layers, in_turn}, trace, work, ringer);
    return {times.compute_ns, times.wait_ns, std::move(times.trace_ns)};
}

}  // namespace
}  // namespace neoflex

NB_MODULE(_attention, m) {
    using namespace neoflex;
    m.doc() = "Decode attention over a region. Regions come from svc_common.tensor_plane, threads from svc_common.cpu_kernels.";
    nb::exception<Interrupted>(m, "InterruptedIterationError");
    nb::class_<LayerRunner>(m, "LayerRunner", "The first layers of a region's model.")
        .def(
            "__init__",
            [](LayerRunner* self, Region& region, const std::string& instruction_set, ThreadPool& threads,
               DecoderLinear& linear, std::vector<std::int32_t> rotation_of_layer) {
                new (self) LayerRunner(region, choose_kernel(instruction_set), threads, linear,
                                       std::move(rotation_of_layer));
            },
            "region"_a, "instruction_set"_a, "threads"_a, "linear"_a, "rotation_of_layer"_a, nb::keep_alive<1, 2>(),
            nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
            nb::sig("def __init__(self, region: svc_common.tensor_plane._plane.Region, instruction_set: str, "
                    "threads: svc_common.cpu_kernels._kernels.ThreadPool, "
                    "linear: svc_common.cpu_kernels._kernels.DecoderLinear, rotation_of_layer: list[int]) -> None"),
            "`rotation_of_layer`: by layer, which of a batch's rotations is its. Raises PlaneError where the layers are\n"
            "not those of the region.");
    nb::class_<Worker>(m, "Worker", "Computes iterations over one region.")
        .def(
            "__init__",
            [](Worker* self, Region& region, const std::string& instruction_set, ThreadPool& threads,
               LayerRunner* layers) { new (self) Worker(region, choose_kernel(instruction_set), threads, layers); },
            "region"_a, "instruction_set"_a, "threads"_a, "layers"_a.none(), nb::keep_alive<1, 2>(),
            nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
            nb::sig("def __init__(self, region: svc_common.tensor_plane._plane.Region, instruction_set: str, "
                    "threads: svc_common.cpu_kernels._kernels.ThreadPool, layers: LayerRunner | None) -> None"))
        .def("run", &run_iteration, "sub_batches"_a, "first_layer"_a, "num_layers"_a, "in_turn"_a, "device_rings"_a,
             "trace"_a, "first_batch"_a, "batches"_a,
             nb::sig("def run(self, sub_batches: list[tuple[int, int, numpy.typing.NDArray[numpy.int32], "
                     "numpy.typing.NDArray[numpy.int32]]], first_layer: int, num_layers: int, in_turn: bool, device_rings: bool, "
                     "trace: bool, first_batch: int, batches: list[tuple[int, int, numpy.typing.NDArray[numpy.int32], "
                     "numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], "
                     "numpy.typing.NDArray[numpy.int32], list[tuple[int, int]]]]) -> "
                     "tuple[int, int, list[list[int]]]"),
             "Attention in some layers of (slot, first_submit, context_tokens, block_tables) in the order in which each\n"
             "layer submits them, or with `in_turn` all layers of one before the next, rung for by a device's stream where\n"
             "`device_rings`; and (first_row, num_layers, chunk_starts, chunk_tokens, context_tokens, block_tables,\n"
             "rotations) through the CPU layers, tables of chunks before those of decodes, rotations as addresses of cos\n"
             "and sin. Returns (compute_ns, wait_ns, trace); the last is empty unless `trace`, see IterationTimes.")
        .def("cancel", &Worker::cancel, "Ends the running iteration, and each later one, at its next wait or CPU layer.")
        .def_prop_ro("computing_ns", &Worker::computing_ns,
                     "For how long it has been computing in a single layer; 0 while it waits or is idle.");
}
