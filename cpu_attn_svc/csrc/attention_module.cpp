// Python's view of the worker: the thread pool, one call per iteration, and the kernel by itself.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <utility>

#include "worker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neoflex {
namespace {

using Int32Vector = nb::ndarray<const std::int32_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Int32Matrix = nb::ndarray<const std::int32_t, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
// slot, first_submit, context_tokens, block_tables
using SubBatchArrays = std::tuple<int, std::uint32_t, Int32Vector, Int32Matrix>;

DecodeBatch make_batch(const Int32Vector& context_tokens, const Int32Matrix& block_tables) {
    if (context_tokens.shape(0) != block_tables.shape(0))
        throw nb::value_error("context_tokens and block_tables differ in their number of sequences");
    return {static_cast<std::int32_t>(context_tokens.shape(0)), context_tokens.data(), block_tables.data(),
            static_cast<std::int32_t>(block_tables.shape(1))};
}

std::pair<std::uint64_t, std::uint64_t> run_iteration(Worker& worker, const std::vector<SubBatchArrays>& arrays) {
    std::vector<SubBatch> sub_batches;
    for (const auto& [slot, first_submit, context_tokens, block_tables] : arrays)
        sub_batches.push_back({slot, first_submit, make_batch(context_tokens, block_tables)});
    nb::gil_scoped_release release;
    const IterationTimes times = worker.run(sub_batches);
    return {times.compute_ns, times.wait_ns};
}

DType dtype_of(const AnyArray& array) {
    if (array.dtype() == nb::dtype<float>()) return DType::fp32;
    if (array.dtype() == nb::dtype<std::uint16_t>()) return DType::bf16;
    if (array.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && array.dtype().bits == 16)
        return DType::fp16;
    throw nb::type_error("arrays must be float32, float16 or, for bf16, uint16");
}

void require_shape(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

// See the binding's text.
nb::ndarray<nb::numpy> decode_attention(const AnyArray& q, const AnyArray& pool_layer,
                                        const Int32Matrix& block_tables, const Int32Vector& context_tokens,
                                        float softmax_scale, std::int32_t sliding_window,
                                        const std::string& instruction_set, int num_threads) {
    require_shape(q.ndim() == 3 && pool_layer.ndim() == 5, "q has 3 axes, pool_layer 5");
    const HeadCounts heads{static_cast<std::int32_t>(q.shape(1)), static_cast<std::int32_t>(pool_layer.shape(2))};
    require_shape(q.shape(0) == context_tokens.shape(0), "q and context_tokens differ in their number of sequences");
    require_shape(q.shape(2) == pool_layer.shape(4) && pool_layer.shape(1) == 2, "pool_layer does not fit q");
    require_shape(num_threads >= 1, "num_threads must be at least 1");
    const Shape shape{1,
                      heads.num_q_heads,
                      heads.num_kv_heads,
                      static_cast<std::int32_t>(q.shape(2)),
                      static_cast<std::int32_t>(pool_layer.shape(3)),
                      dtype_of(pool_layer),
                      dtype_of(q),
                      static_cast<std::int32_t>(q.shape(0)),
                      softmax_scale,
                      sliding_window};
    shape.check();
    const DecodeBatch batch = make_batch(context_tokens, block_tables);
    check_decodes(batch, shape, static_cast<std::int32_t>(pool_layer.shape(0)));
    const Kernel& kernel = choose_kernel(instruction_set);
    const KernelShape kernel_shape = make_kernel_shape(heads, shape.head_dim, shape.block_tokens, shape.kv_dtype,
                                                       shape.exchange_dtype, softmax_scale);
    auto out = std::make_unique<std::byte[]>(q.nbytes());
    const LayerTensors layer{const_cast<std::byte*>(static_cast<const std::byte*>(pool_layer.data())),
                             static_cast<const std::byte*>(q.data()), nullptr, nullptr, out.get()};
    {
        nb::gil_scoped_release release;
        ThreadPool threads(num_threads);
        DecodeAttention attention(kernel, heads, kernel_shape, threads);
        attention.prepare(threads.resize());
        DecodePlan plan(batch, heads, kernel_shape, sliding_window, num_threads);
        attention.run(plan, layer);
    }
    std::byte* data = out.get();
    const nb::capsule owner(out.release(), [](void* bytes) noexcept { delete[] static_cast<std::byte*>(bytes); });
    return nb::ndarray<nb::numpy>(data, {q.shape(0), q.shape(1), q.shape(2)}, owner, {}, q.dtype());
}

std::vector<std::string> runnable_instruction_sets() {
    std::vector<std::string> names;
    for (const Kernel* kernel : runnable_kernels()) names.emplace_back(kernel->name);
    return names;
}

}  // namespace
}  // namespace neoflex

NB_MODULE(_attention, m) {
    using namespace neoflex;
    m.doc() = "Decode attention on the CPU. Region objects come from svc_common.tensor_plane.";
    nb::exception<Interrupted>(m, "InterruptedIterationError");
    nb::class_<ThreadPool>(m, "ThreadPool", "Threads that compute, the caller's included.")
        .def(nb::init<int>(), "num_threads"_a)
        .def_prop_rw("num_threads", &ThreadPool::num_threads, &ThreadPool::set_num_threads,
                     "A change takes effect with the next iteration.");
    nb::class_<Worker>(m, "Worker", "Computes iterations over one region.")
        .def(
            "__init__",
            [](Worker* self, Region& region, const std::string& instruction_set, ThreadPool& threads) {
                new (self) Worker(region, choose_kernel(instruction_set), threads);
            },
            "region"_a, "instruction_set"_a, "threads"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(),
            nb::sig("def __init__(self, region: svc_common.tensor_plane._plane.Region, instruction_set: str, "
                    "threads: ThreadPool) -> None"))
        .def("run", &run_iteration, "sub_batches"_a,
             nb::sig("def run(self, sub_batches: list[tuple[int, int, numpy.typing.NDArray[numpy.int32], "
                     "numpy.typing.NDArray[numpy.int32]]]) -> tuple[int, int]"),
             "One iteration of (slot, first_submit, context_tokens, block_tables) in the order in which each layer\n"
             "submits them. Returns (compute_ns, wait_ns).")
        .def("cancel", &Worker::cancel, "Ends the running iteration, and each later one, at its next wait.");
    m.def("runnable_instruction_sets", &runnable_instruction_sets, "Names, slowest first.");
    m.def(
        "choose_instruction_set", [](const std::string& wanted) { return std::string(choose_kernel(wanted).name); },
        "wanted"_a, "The fastest for \"auto\". Raises ValueError where the wanted one does not run here.");
    m.def("decode_attention", &decode_attention, "q"_a, "pool_layer"_a, "block_tables"_a, "context_tokens"_a,
          "softmax_scale"_a, "sliding_window"_a, "instruction_set"_a, "num_threads"_a,
          nb::sig("def decode_attention(q: numpy.typing.NDArray[typing.Any], "
                  "pool_layer: numpy.typing.NDArray[typing.Any], block_tables: numpy.typing.NDArray[numpy.int32], "
                  "context_tokens: numpy.typing.NDArray[numpy.int32], softmax_scale: float, sliding_window: int, "
                  "instruction_set: str, num_threads: int) -> numpy.typing.NDArray[typing.Any]"),
          "Attention of q [n, num_q_heads, head_dim] over one layer [num_blocks, 2, num_kv_heads, block_tokens,\n"
          "head_dim] that holds all tokens already. float32, float16, or bf16 as uint16.");
}
