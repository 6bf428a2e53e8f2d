// Python's view of a region: making, attaching, and the executor's side of the doorbells.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "exchange.h"
#include "region.h"
#include "borrowed_tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neoflex {
namespace {

void check_slot(int slot) {
    if (slot < 0 || slot >= num_slots) throw nb::index_error("slot must be 0 or 1");
}

Shape make_shape(std::int32_t num_layers, std::int32_t num_q_heads, std::int32_t num_kv_heads, std::int32_t head_dim,
                 std::int32_t block_tokens, const std::string& kv_dtype, const std::string& exchange_dtype,
                 std::int32_t max_sequences, float softmax_scale, float softcap,
                 const std::vector<std::int32_t>& sliding_windows, std::int32_t num_cpu_layers,
                 std::int32_t num_gpu_blocks, std::int32_t hidden_size, std::int32_t max_tokens) {
    Shape shape{num_layers,
                num_q_heads,
                num_kv_heads,
                head_dim,
                block_tokens,
                parse_dtype(kv_dtype),
                parse_dtype(exchange_dtype),
                max_sequences,
                softmax_scale,
                softcap,
                {},
                num_cpu_layers,
                num_gpu_blocks,
                hidden_size,
                max_tokens};
    if (!sliding_windows.empty() && sliding_windows.size() != static_cast<std::size_t>(num_layers))
        throw PlaneError("shape: sliding_windows has not one value for each layer");
    shape.check();  // The layers fit.
    std::copy(sliding_windows.begin(), sliding_windows.end(), shape.sliding_windows.begin());
    shape.check();
    return shape;
}

// Rows [first_row, first_row + num_rows) of a tensor's axis 0, from which the two last axes are left.
RowsView rows_of(const BorrowedTensor& tensor, std::int64_t first_row, int head_axis) {
    return {tensor.data() + first_row * tensor.stride_bytes(0), static_cast<std::size_t>(tensor.stride_bytes(0)),
            static_cast<std::size_t>(tensor.stride_bytes(head_axis))};
}

void check_rows(const BorrowedTensor& tensor, const Shape& shape, std::int64_t first_row, std::int64_t num_rows) {
    tensor.require(num_rows >= 0 && num_rows <= tensor.size(0) && first_row >= 0 &&
                       first_row <= tensor.size(0) - num_rows,
                   "has not all of these rows");
    tensor.require(num_rows <= shape.max_sequences, "has more rows than fit into a slot");
}

void check_heads(const BorrowedTensor& tensor, const Shape& shape, int head_axis, std::int32_t num_heads) {
    tensor.require(tensor.size(head_axis) == num_heads && tensor.size(head_axis + 1) == shape.head_dim,
                   "has other heads than the region");
}

void submit(Exchange& exchange, int slot, nb::handle q, nb::handle kv, std::int64_t first_row, std::int64_t num_rows) {
    check_slot(slot);
    const Shape& shape = exchange.region().shape();
    const BorrowedTensor queries(q, "q", shape.exchange_dtype, 3);
    const BorrowedTensor keys_values(kv, "kv", shape.exchange_dtype, 4);
    check_rows(queries, shape, first_row, num_rows);
    check_rows(keys_values, shape, first_row, num_rows);
    check_heads(queries, shape, 1, shape.num_q_heads);
    check_heads(keys_values, shape, 2, shape.num_kv_heads);
    keys_values.require(keys_values.size(1) == 2, "is not K and V");
    const RowsView k = rows_of(keys_values, first_row, 2);
    const RowsView v{k.data + keys_values.stride_bytes(1), k.row_bytes, k.head_bytes};
    exchange.submit(slot, num_rows, rows_of(queries, first_row, 1), k, v);
}

Outcome wait(Exchange& exchange, int slot, double timeout_s) {
    check_slot(slot);
    // Another Python thread that gets the interpreter's lock may keep it for milliseconds.
    if (exchange.is_completed(slot)) return Outcome::completed;
    nb::gil_scoped_release release;
    return exchange.wait(slot, std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(timeout_s)));
}

Outcome wait_and_take(Exchange& exchange, int slot, nb::handle out, std::int64_t first_row, std::int64_t num_rows,
                      double timeout_s) {
    const Shape& shape = exchange.region().shape();
    const BorrowedTensor attention(out, "out", shape.exchange_dtype, 3);
    check_rows(attention, shape, first_row, num_rows);
    check_heads(attention, shape, 1, shape.num_q_heads);
    const Outcome outcome = wait(exchange, slot, timeout_s);
    if (outcome == Outcome::completed) exchange.take(slot, num_rows, rows_of(attention, first_row, 1));
    return outcome;
}

void bind_region(nb::module_& m) {
    nb::class_<Region>(m, "Region", "One mapped region. Offsets and sizes are in bytes.")
        .def_static(
            "create",
            [](const std::string& path, std::uint64_t epoch, const Shape& shape, std::size_t pool_bytes,
               const std::vector<int>& cpus) { return Region::create(path, epoch, shape, pool_bytes, cpus); },
            "path"_a, "epoch"_a, "shape"_a, "pool_bytes"_a, "cpus"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Makes the file, of as many blocks as fit into `pool_bytes`, and becomes its owner. The memory is touched\n"
            "first by threads on `cpus`, or by the caller.")
        .def_static("attach", &Region::attach, "path"_a, "epoch"_a, "shape"_a,
                    nb::call_guard<nb::gil_scoped_release>(), "Maps a file that the owner made, as its executor.")
        .def_prop_ro("epoch", &Region::epoch)
        .def_prop_ro("num_blocks", &Region::num_blocks)
        .def_prop_ro("region_bytes", [](const Region& r) { return r.layout().region_bytes; })
        .def_prop_ro(
            "pool_bytes",
            [](const Region& r) {
                const Layout& at = r.layout();
                return at.pool_bytes + at.scales_bytes + at.lower_bytes + at.lower_scales_bytes;
            },
            "Of all blocks, scales included.")
        .def_prop_ro("pool_offset", [](const Region& r) { return r.layout().pool_offset; })
        .def_prop_ro("scales_offset", [](const Region& r) { return r.layout().scales_offset; })
        .def_prop_ro("lower_offset", [](const Region& r) { return r.layout().lower_offset; })
        .def_prop_ro("lower_scales_offset", [](const Region& r) { return r.layout().lower_scales_offset; })
        .def_prop_ro("num_lower_blocks", &Region::num_lower_blocks, "That the lower pool has.")
        .def_prop_ro("hidden_offset", [](const Region& r) { return r.layout().hidden_offset; })
        .def(
            "slot_offsets",
            [](const Region& r, int slot) {
                check_slot(slot);
                const Layout& at = r.layout();
                const std::size_t start = at.exchange_offset + slot * at.slot_bytes;
                return nb::make_tuple(start + at.slot_q, start + at.slot_k, start + at.slot_v, start + at.slot_out);
            },
            "slot"_a, nb::sig("def slot_offsets(self, slot: int) -> tuple[int, int, int, int]"),
            "Where q, k, v and out of an exchange slot start.")
        .def(
            "word_offsets",
            [](const Region& r, int slot) {
                check_slot(slot);
                const auto offset = [&](const Doorbell& bell) {
                    return static_cast<std::size_t>(reinterpret_cast<const std::byte*>(&bell.number) - r.base());
                };
                return nb::make_tuple(offset(r.control().submitted[slot]), offset(r.control().completed[slot]));
            },
            "slot"_a, nb::sig("def word_offsets(self, slot: int) -> tuple[int, int]"),
            "Where the 32-bit numbers lie of what is submitted and what is completed.")
        .def(
            "memory",
            [](nb::handle_t<Region> self) {
                Region& region = nb::cast<Region&>(self);
                return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(region.base(), {region.layout().region_bytes},
                                                                        self);
            },
            nb::sig("def memory(self) -> numpy.typing.NDArray[numpy.uint8]"),
            "All of it, as bytes. Keeps the mapping alive.")
        .def(
            "refuse",
            [](Region& region, std::uint64_t iteration) {
                region.control().refused_iteration.store(iteration, std::memory_order_release);
                for (auto& bell : region.control().completed) bell.nudge();
                region.control().layers_completed.nudge();
            },
            "iteration"_a, "Owner: ends the executor's waits in this iteration.")
        .def_prop_ro("is_attached", &Region::is_attached)
        .def_prop_ro("is_closed", &Region::is_closed)
        .def("peer_alive", &Region::peer_alive, "Whether the other side's process lives and holds the region.")
        .def("close", &Region::close, "Gives the region up; arrays of it stay valid.");
}

void bind_exchange(nb::module_& m) {
    nb::class_<Exchange>(m, "Exchange", "The executor's side of a region's exchange slots. For one thread at a time.")
        .def(nb::init<Region&>(), "region"_a, nb::keep_alive<1, 2>())
        .def(
            "num_submits",
            [](const Exchange& exchange, int slot) {
                check_slot(slot);
                return exchange.num_submits(slot);
            },
            "slot"_a, "So far, modulo 2^32.")
        .def("begin", &Exchange::begin, "iteration"_a, "device_rings"_a,
             "Waits belong to this iteration from now on. Where a device rings, all slots' numbers start from 0: the\n"
             "worker's report of the iteration before must have come.")
        .def(
            "numbers",
            [](const Exchange& exchange, int slot) {
                check_slot(slot);
                const auto [submitted, completed] = exchange.numbers(slot);
                return nb::make_tuple(submitted, completed);
            },
            "slot"_a, nb::sig("def numbers(self, slot: int) -> tuple[int, int]"),
            "Layers that a slot has submitted in this iteration and that are answered, where a device rings.")
        .def("outlook", &Exchange::outlook,
             "PEER_LOST or REFUSED where no answer will come in this iteration, else COMPLETED. From any thread.")
        .def("release_device", &Exchange::release_device,
             "Ends all waits of a device in this iteration, unanswered as they are. From any thread.")
        .def(
            "ring",
            [](Exchange& exchange, int slot) {
                check_slot(slot);
                exchange.ring(slot);
            },
            "slot"_a, "q, k and v of this slot's next layer are in place.")
        .def("submit", &submit, "slot"_a, "q"_a, "kv"_a, "first_row"_a, "num_rows"_a,
             nb::sig("def submit(self, slot: int, q: object, kv: object, first_row: int, num_rows: int) -> None"),
             "Copies num_rows rows from first_row on of q [n, num_q_heads, head_dim] and kv [n, 2, num_kv_heads,\n"
             "head_dim] into the slot and rings. CPU tensors of the exchange type, bf16 also as uint16, any strides\n"
             "but in the last axis. Raises PlaneError where they are not that.")
        .def_prop_ro("num_layer_batches", &Exchange::num_layer_batches,
                     "Handed over to the CPU layers so far, modulo 2^32.")
        .def("submit_layers", &Exchange::submit_layers, "num_batches"_a,
             "The hidden states of so many more batches are in place.")
        .def(
            "wait_layers",
            [](Exchange& exchange, std::uint32_t num_batches, double timeout_s) {
                const auto timeout = std::chrono::duration<double>(timeout_s);
                return exchange.wait_layers(num_batches, std::chrono::duration_cast<nanoseconds>(timeout));
            },
            "num_batches"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Waits until so many of all batches, modulo 2^32, are through the CPU layers.")
        .def("wait", &wait, "slot"_a, "timeout_s"_a, "Waits until the slot's last submit is answered.")
        .def("wait_and_take", &wait_and_take, "slot"_a, "out"_a, "first_row"_a, "num_rows"_a, "timeout_s"_a,
             nb::sig("def wait_and_take(self, slot: int, out: object, first_row: int, num_rows: int, "
                     "timeout_s: float) -> Outcome"),
             "Waits, then copies the answer into rows of out [n, num_q_heads, head_dim], a tensor as for submit.")
        .def_prop_ro(
            "waited_ns", [](const Exchange& exchange) { return exchange.waited().count(); }, "In all waits so far.");
}

}  // namespace
}  // namespace neoflex

NB_MODULE(_plane, m) {
    using namespace neoflex;
    m.doc() = "The shared region and its doorbells.";
    m.attr("LAYOUT_VERSION") = layout_version;
    m.attr("NUM_SLOTS") = num_slots;
    m.attr("MAX_HEAD_DIM") = max_head_dim;
    nb::exception<PlaneError>(m, "PlaneError");
    nb::enum_<Outcome>(m, "Outcome", "How a wait ended.")
        .value("COMPLETED", Outcome::completed)
        .value("TIMED_OUT", Outcome::timed_out)
        .value("PEER_LOST", Outcome::peer_lost)
        .value("REFUSED", Outcome::refused);
    nb::class_<Shape>(m, "Shape", "The attention that is computed over a region.")
        .def_static("make", &make_shape, "num_layers"_a, "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a,
                    "block_tokens"_a, "kv_dtype"_a, "exchange_dtype"_a, "max_sequences"_a, "softmax_scale"_a,
                    "softcap"_a, "sliding_windows"_a, "num_cpu_layers"_a, "num_gpu_blocks"_a, "hidden_size"_a,
                    "max_tokens"_a, "`sliding_windows`: one for each layer, or none at all.");
    bind_region(m);
    bind_exchange(m);
    m.def(
        "try_lock_as_owner", [](int fd) { return try_lock(fd, Side::owner); }, "fd"_a,
        "Takes the owner's byte of an open region file, until that descriptor is closed. False where its owner lives.");
}
