// Python's view of attention: work prepared once per iteration, then one call per layer on tensors as they are.
#include "attention_bindings.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "arrays.h"
#include "kernels.h"
#include "kv_write.h"
#include "prefill_attention.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neoflex {
namespace {

void require(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

void require_contiguous(const TensorView& array) {
    std::int64_t stride = 1;
    for (std::size_t i = array.ndim; i-- > 0; stride *= array.shape[i])
        require(array.stride[i] == stride || array.shape[i] == 1, "blocks or scales are not contiguous");
}

// The scales beside a cache or layer of blocks [..., 2, num_kv_heads, block_tokens * head_dim]; null where they are None.
float* scales_of(nb::handle array, const TensorView& blocks) {
    require(array.is_none() == (blocks.dtype != DType::int8), "scales belong to blocks in int8, and to these only");
    if (array.is_none()) return nullptr;
    const TensorView scales = view_of(array);
    const bool fits = scales.dtype == DType::fp32 && scales.ndim + 1 == blocks.ndim &&
                      std::equal(scales.shape, scales.shape + scales.ndim, blocks.shape);
    require(fits, "scales are not float32 [..., 2, num_kv_heads] as the blocks are");
    require_contiguous(scales);
    return reinterpret_cast<float*>(scales.data);
}

// What all work on one kind of cache has in common.
struct Attention {
    Attention(const Shape& shape, const std::string& instruction_set, ThreadPool& threads)
        : shape(shape),
          heads{shape.num_q_heads, shape.num_kv_heads},
          kernel_shape(make_kernel_shape(heads, shape.head_dim, shape.block_tokens, shape.kv_dtype,
                                         shape.exchange_dtype, shape.softmax_scale, shape.softcap)),
          threads(threads),
          decode(choose_kernel(instruction_set), heads, kernel_shape, threads),
          prefill(choose_kernel(instruction_set), heads, kernel_shape, threads) {}
    Attention(const Attention&) = delete;

    // [num_blocks, 2, num_kv_heads, block_tokens * head_dim]
    void check_layer(const TensorView& layer, std::int32_t num_blocks) const {
        const std::int64_t half_head = std::int64_t{shape.block_tokens} * shape.head_dim;
        require(layer.ndim == 4 && layer.shape[1] == 2 && layer.shape[2] == heads.num_kv_heads &&
                    layer.shape[3] == half_head,
                "layer is not [num_blocks, 2, num_kv_heads, block_tokens * head_dim]");
        require(layer.shape[0] >= num_blocks, "layer has too few blocks");
        require_contiguous(layer);
        require(layer.dtype == shape.kv_dtype, "layer is not of the KV type");
    }

    // [num_tokens, num_q_heads, head_dim], heads contiguous
    void check_rows(const TensorView& rows, std::int32_t num_tokens) const {
        require(rows.ndim == 3 && rows.shape[0] == num_tokens && rows.shape[1] == heads.num_q_heads &&
                    rows.shape[2] == shape.head_dim,
                "q and out are not [num_tokens, num_q_heads, head_dim]");
        require(rows.stride[2] == 1 && rows.stride[1] == shape.head_dim, "q's and out's heads are not contiguous");
        require(rows.dtype == shape.exchange_dtype, "q and out are not of the exchange type");
    }

    Shape shape;
    HeadCounts heads;
    KernelShape kernel_shape;
    ThreadPool& threads;
    DecodeAttention decode;
    PrefillAttention prefill;
};

// One more than the largest block that sequences of `context_tokens` use. Throws PlaneError where a number is impossible.
std::int32_t count_blocks(const DecodeBatch& batch, Shape shape) {
    shape.max_sequences = batch.num_sequences;
    check_decodes(batch, shape, std::numeric_limits<std::int32_t>::max());
    std::int32_t num_blocks = 0;
    for (std::int32_t s = 0; s < batch.num_sequences; ++s)
        for (std::int32_t b = 0; b * shape.block_tokens < batch.context_tokens[s]; ++b)
            num_blocks = std::max(num_blocks, batch.block_tables[s * batch.stride + b] + 1);
    return num_blocks;
}

struct DecodeWork {
    DecodeWork(Attention& attention, const Int32Vector& context_tokens, const Int32Matrix& block_tables)
        : attention(attention),
          context(context_tokens.data(), context_tokens.data() + context_tokens.size()),
          tables(block_tables.data(), block_tables.data() + block_tables.size()),
          num_blocks(count_blocks(make_batch(context_tokens, block_tables), attention.shape)),
          plan({static_cast<std::int32_t>(context.size()), context.data(), tables.data(),
                static_cast<std::int32_t>(block_tables.shape(1))},
               attention.heads, attention.kernel_shape, attention.shape.sliding_windows[0], attention.threads.resize()) {}
    DecodeWork(const DecodeWork&) = delete;

    void run(nb::handle q_array, nb::handle layer_array, nb::handle out_array, nb::handle scales_array) {
        const TensorView q = view_of(q_array), layer = view_of(layer_array), out = view_of(out_array);
        const auto num_sequences = static_cast<std::int32_t>(context.size());
        attention.check_rows(q, num_sequences);
        attention.check_rows(out, num_sequences);
        attention.check_layer(layer, num_blocks);
        const LayerTensors tensors{layer.data,
                                   scales_of(scales_array, layer),
                                   q.data,
                                   static_cast<std::size_t>(q.stride[0]),
                                   nullptr,
                                   nullptr,
                                   out.data,
                                   static_cast<std::size_t>(out.stride[0])};
        nb::gil_scoped_release release;
        attention.decode.run(plan, tensors);
    }

    Attention& attention;
    std::vector<std::int32_t> context;
    std::vector<std::int32_t> tables;
    std::int32_t num_blocks;
    DecodePlan plan;
};

struct PrefillWork {
    PrefillWork(Attention& attention, std::int32_t start, std::int32_t num_tokens, const Int32Vector& block_table)
        : attention(attention),
          table(block_table.data(), block_table.data() + block_table.size()),
          chunk{start, num_tokens, attention.shape.sliding_windows[0], table.data()} {
        require(start >= 0 && num_tokens >= 1, "start must not be negative, num_tokens at least 1");
        const std::int32_t end = start + num_tokens;
        num_blocks = count_blocks({1, &end, table.data(), static_cast<std::int32_t>(table.size())}, attention.shape);
        attention.threads.resize();
    }
    PrefillWork(const PrefillWork&) = delete;

    void run(nb::handle q_array, nb::handle layer_array, nb::handle out_array, nb::handle scales_array) {
        const TensorView q = view_of(q_array), layer = view_of(layer_array), out = view_of(out_array);
        attention.check_rows(q, chunk.num_tokens);
        attention.check_rows(out, chunk.num_tokens);
        attention.check_layer(layer, num_blocks);
        const PrefillTensors tensors{layer.data,
                                     scales_of(scales_array, layer),
                                     q.data,
                                     static_cast<std::size_t>(q.stride[0]),
                                     out.data,
                                     static_cast<std::size_t>(out.stride[0])};
        nb::gil_scoped_release release;
        attention.prefill.run(chunk, tensors);
    }

    Attention& attention;
    std::vector<std::int32_t> table;
    PrefillChunk chunk;
    std::int32_t num_blocks = 0;
};

void write_tokens(ThreadPool& threads, nb::handle layer_array, const Int32Vector& blocks, const Int32Vector& offsets,
                  nb::handle kv_array, const std::string& instruction_set, nb::handle scales_array) {
    const TensorView layer = view_of(layer_array), kv = view_of(kv_array);
    require(layer.ndim == 4 && kv.ndim == 4 && kv.shape[1] == 2 && layer.shape[1] == 2 && kv.shape[3] >= 1 &&
                kv.shape[3] <= max_head_dim && layer.shape[2] == kv.shape[2] && layer.shape[3] % kv.shape[3] == 0,
            "kv is not [n, 2, num_kv_heads, head_dim] or does not fit layer [num_blocks, 2, num_kv_heads, "
            "block_tokens * head_dim]");
    require(blocks.size() == static_cast<std::size_t>(kv.shape[0]) && offsets.size() == blocks.size(),
            "blocks, offsets and kv differ in length");
    require(kv.stride[3] == 1 && kv.stride[2] == kv.shape[3] && kv.stride[1] == kv.shape[3] * kv.shape[2],
            "a token's kv is not contiguous");
    require(kv.dtype != DType::int8, "kv is in int8");
    require_contiguous(layer);
    const Blocks blocks_of_layer{layer.data, scales_of(scales_array, layer)};
    const auto num_heads = static_cast<std::int32_t>(kv.shape[2]);
    const HeadCounts heads{num_heads, num_heads};
    const KernelShape shape =
        make_kernel_shape(heads, static_cast<std::int32_t>(kv.shape[3]),
                          static_cast<std::int32_t>(layer.shape[3] / kv.shape[3]), layer.dtype, kv.dtype, 1.0f, no_softcap);
    const KvTokens tokens{static_cast<std::int32_t>(kv.shape[0]), blocks.data(), offsets.data(), kv.data,
                          static_cast<std::size_t>(kv.stride[0])};
    const Kernel& kernel = choose_kernel(instruction_set);
    nb::gil_scoped_release release;
    check_places(tokens, shape, static_cast<std::int32_t>(layer.shape[0]));
    threads.resize();
    write_kv(kernel, heads, shape, threads, tokens, blocks_of_layer);
}

KernelShape copy_shape(const TensorView& blocks, std::int32_t head_dim) {
    require(blocks.ndim == 5 && blocks.shape[2] == 2 && blocks.shape[4] % head_dim == 0,
            "blocks are not [num_layers, num_blocks, 2, num_kv_heads, block_tokens * head_dim]");
    require_contiguous(blocks);
    const auto num_heads = static_cast<std::int32_t>(blocks.shape[3]);
    return make_kernel_shape({num_heads, num_heads}, head_dim, static_cast<std::int32_t>(blocks.shape[4] / head_dim),
                             blocks.dtype, DType::fp32, 1.0f, no_softcap);
}

void copy_between(ThreadPool& threads, nb::handle from_array, nb::handle from_scales, const Int32Vector& from_blocks,
                  nb::handle to_array, nb::handle to_scales, const Int32Vector& to_blocks, const Int32Vector& num_tokens,
                  std::int32_t head_dim, const std::string& instruction_set) {
    require(head_dim >= 1 && head_dim <= max_head_dim, "head_dim must be in [1, 256]");
    const TensorView from = view_of(from_array), to = view_of(to_array);
    const KernelShape from_shape = copy_shape(from, head_dim), to_shape = copy_shape(to, head_dim);
    require(from.shape[0] == to.shape[0] && std::equal(from.shape + 2, from.shape + 5, to.shape + 2),
            "both caches' blocks are not of one shape");
    require(from_blocks.size() == to_blocks.size() && num_tokens.size() == to_blocks.size(),
            "from_blocks, to_blocks and num_tokens differ in length");
    const BlockCopy copy{from_shape,
                         to_shape,
                         static_cast<std::int32_t>(from.shape[0]),
                         static_cast<std::int32_t>(from.shape[1]),
                         static_cast<std::int32_t>(to.shape[1]),
                         static_cast<std::int32_t>(from_blocks.size()),
                         from_blocks.data(),
                         to_blocks.data(),
                         num_tokens.data()};
    const auto num_heads = static_cast<std::int32_t>(from.shape[3]);
    const Blocks source{from.data, scales_of(from_scales, from)}, target{to.data, scales_of(to_scales, to)};
    const Kernel& kernel = choose_kernel(instruction_set);
    nb::gil_scoped_release release;
    copy_blocks(kernel, {num_heads, num_heads}, threads, copy, source, target);
}

void make_attention(Attention* self, std::int32_t num_q_heads, std::int32_t num_kv_heads, std::int32_t head_dim,
                    std::int32_t block_tokens, const std::string& kv_dtype, const std::string& exchange_dtype,
                    float softmax_scale, std::int32_t sliding_window, float softcap, const std::string& instruction_set,
                    ThreadPool& threads) {
    const Shape shape{1,
                      num_q_heads,
                      num_kv_heads,
                      head_dim,
                      block_tokens,
                      parse_dtype(kv_dtype),
                      parse_dtype(exchange_dtype),
                      1,
                      softmax_scale,
                      softcap,
                      {sliding_window}};
    shape.check();
    new (self) Attention(shape, instruction_set, threads);
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.attr("NO_SOFTCAP") = no_softcap;
    nb::class_<Attention>(m, "Attention", "Attention over caches of one shape, on the threads of a pool.")
        .def("__init__", &make_attention, "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a, "block_tokens"_a,
             "kv_dtype"_a, "exchange_dtype"_a, "softmax_scale"_a, "sliding_window"_a, "softcap"_a, "instruction_set"_a,
             "threads"_a, nb::keep_alive<1, 12>(),
             "Types are \"fp32\", \"fp16\", \"bf16\" or, of KV only, \"int8\"; the exchange type is that of q and out. A\n"
             "sliding window or a softcap of 0 is none. Raises PlaneError where the shape is impossible.");
    const char* run_text =
        "One layer: q and out [num_tokens, num_q_heads, head_dim], heads contiguous; layer_blocks [num_blocks, 2,\n"
        "num_kv_heads, block_tokens * head_dim], laid out as svc_common/tensor_plane/csrc/layout.h says. torch or\n"
        "numpy; bf16 may come as uint16. scales [num_blocks, 2, num_kv_heads], float32, for blocks in int8. Raises\n"
        "ValueError or TypeError where one does not fit.";
    const auto run_sig =
        nb::sig("def run(self, q: object, layer_blocks: object, out: object, scales: object = None) -> None");
    nb::class_<DecodeWork>(m, "DecodeWork", "One token of each of n sequences whose KV, this token's too, lies in blocks.")
        .def(nb::init<Attention&, const Int32Vector&, const Int32Matrix&>(), "attention"_a, "context_tokens"_a,
             "block_tables"_a, nb::keep_alive<1, 2>(),
             nb::sig("def __init__(self, attention: Attention, context_tokens: numpy.typing.NDArray[numpy.int32], "
                     "block_tables: numpy.typing.NDArray[numpy.int32]) -> None"),
             "context_tokens [n], block_tables [n, stride]. Raises PlaneError where a number is out of range.")
        .def("run", &DecodeWork::run, "q"_a, "layer_blocks"_a, "out"_a, "scales"_a = nb::none(),
             run_sig, run_text);
    nb::class_<PrefillWork>(m, "PrefillWork", "A chunk of one prompt, causal, whose KV up to its end lies in blocks.")
        .def(nb::init<Attention&, std::int32_t, std::int32_t, const Int32Vector&>(), "attention"_a, "start"_a,
             "num_tokens"_a, "block_table"_a, nb::keep_alive<1, 2>(),
             nb::sig("def __init__(self, attention: Attention, start: int, num_tokens: int, "
                     "block_table: numpy.typing.NDArray[numpy.int32]) -> None"),
             "`start` tokens come before the chunk. Raises PlaneError where a number is out of range.")
        .def("run", &PrefillWork::run, "q"_a, "layer_blocks"_a, "out"_a, "scales"_a = nb::none(),
             run_sig, run_text);
    m.def("write_kv", &write_tokens, "threads"_a, "layer"_a, "blocks"_a, "offsets"_a, "kv"_a, "instruction_set"_a,
          "scales"_a = nb::none(),
          nb::sig("def write_kv(threads: ThreadPool, layer: object, blocks: numpy.typing.NDArray[numpy.int32], "
                  "offsets: numpy.typing.NDArray[numpy.int32], kv: object, instruction_set: str, "
                  "scales: object = None) -> None"),
          "Stores kv [n, 2, num_kv_heads, head_dim], token i's at offsets[i] in blocks[i] of a layer [num_blocks, 2,\n"
          "num_kv_heads, block_tokens * head_dim]; scales [num_blocks, 2, num_kv_heads], float32, where it is in int8.\n"
          "There a token that exceeds its block's scale makes the block's earlier ones be rounded again: a number is\n"
          "off by (1 + n) / 2 of the block's last scale at most, where the scale grew n times since it was written.\n"
          "Tokens of one block must follow one another; offset 0 forgets what the block held.\n"
          "Raises PlaneError where a place is out of range, else ValueError.");
    m.def("copy_blocks", &copy_between, "threads"_a, "source"_a, "source_scales"_a.none(), "source_blocks"_a, "target"_a,
          "target_scales"_a.none(), "target_blocks"_a, "num_tokens"_a, "head_dim"_a, "instruction_set"_a,
          nb::sig("def copy_blocks(threads: ThreadPool, source: object, source_scales: object, "
                  "source_blocks: numpy.typing.NDArray[numpy.int32], target: object, target_scales: object, "
                  "target_blocks: numpy.typing.NDArray[numpy.int32], num_tokens: numpy.typing.NDArray[numpy.int32], "
                  "head_dim: int, instruction_set: str) -> None"),
          "Copies the first num_tokens[i] tokens of block source_blocks[i] to target_blocks[i], in all layers of caches\n"
          "[num_layers, num_blocks, 2, num_kv_heads, block_tokens * head_dim] of any two types. Scales are None or, in\n"
          "int8, float32 [num_layers, num_blocks, 2, num_kv_heads]. What follows these tokens in a block has no say.\n"
          "Raises PlaneError where a block or a number of tokens is out of range, else ValueError.");
}

}  // namespace neoflex
