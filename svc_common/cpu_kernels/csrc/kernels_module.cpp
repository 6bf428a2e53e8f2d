// Python's view of the kernels: the thread pool they run on, which of them run here, and attention by itself.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "arrays.h"
#include "kernels.h"
#include "linear_module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neoflex {
namespace {

using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

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

NB_MODULE(_kernels, m) {
    using namespace neoflex;
    m.doc() = "What runs on the CPU at its full speed.";
    nb::class_<ThreadPool>(m, "ThreadPool", "Threads that compute, the caller's included.")
        .def(nb::init<int>(), "num_threads"_a)
        .def_prop_rw("num_threads", &ThreadPool::num_threads, &ThreadPool::set_num_threads,
                     "A change takes effect with the next iteration.");
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
    bind_linear(m);
}
