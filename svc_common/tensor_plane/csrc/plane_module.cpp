// Python's view of a region: making, attaching, and the executor's side of the doorbells.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "region.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace neoflex {
namespace {

enum class Outcome { completed, timed_out, peer_lost, refused };

void check_slot(int slot) {
    if (slot < 0 || slot >= num_slots) throw nb::index_error("slot must be 0 or 1");
}

Shape make_shape(std::int32_t num_layers, std::int32_t num_q_heads, std::int32_t num_kv_heads, std::int32_t head_dim,
                 std::int32_t block_tokens, const std::string& kv_dtype, const std::string& exchange_dtype,
                 std::int32_t max_sequences, float softmax_scale, std::int32_t sliding_window) {
    Shape shape{num_layers,
                num_q_heads,
                num_kv_heads,
                head_dim,
                block_tokens,
                parse_dtype(kv_dtype),
                parse_dtype(exchange_dtype),
                max_sequences,
                softmax_scale,
                sliding_window};
    shape.check();
    return shape;
}

// Waits until the worker has completed the slot's submit number `target`, which belongs to `iteration`.
Outcome wait_completed(Region& region, int slot, std::uint32_t target, std::uint64_t iteration, double timeout_s) {
    check_slot(slot);
    // One executor thread waits on a slot at a time.
    static thread_local SpinBudget spin[num_slots];
    Control& control = region.control();
    Outcome end = Outcome::timed_out;
    auto interrupted = [&](bool slept_a_slice) {
        if (control.refused_iteration.load(std::memory_order_acquire) == iteration) {
            end = Outcome::refused;
        } else if (region.is_closed() || (slept_a_slice && !region.peer_alive())) {
            end = Outcome::peer_lost;
        } else {
            return false;
        }
        return true;
    };
    const auto deadline = Clock::now() + std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(timeout_s));
    const auto result = wait_for(control.completed[slot], target, spin[slot], deadline, interrupted);
    return result == WaitResult::reached ? Outcome::completed : end;
}

void bind_region(nb::module_& m) {
    nb::class_<Region>(m, "Region", "One mapped region. Offsets and sizes are in bytes.")
        .def_static(
            "create",
            [](const std::string& path, std::uint64_t epoch, const Shape& shape, std::size_t pool_bytes) {
                return Region::create(path, epoch, shape, pool_bytes);
            },
            "path"_a, "epoch"_a, "shape"_a, "pool_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Makes the file, of as many blocks as fit into `pool_bytes`, and becomes its owner.")
        .def_static("attach", &Region::attach, "path"_a, "epoch"_a, "shape"_a,
                    nb::call_guard<nb::gil_scoped_release>(), "Maps a file that the owner made, as its executor.")
        .def_prop_ro("epoch", &Region::epoch)
        .def_prop_ro("num_blocks", &Region::num_blocks)
        .def_prop_ro("region_bytes", [](const Region& r) { return r.layout().region_bytes; })
        .def_prop_ro("pool_bytes", [](const Region& r) { return r.layout().pool_bytes; })
        .def_prop_ro("pool_offset", [](const Region& r) { return r.layout().pool_offset; })
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
            "memory",
            [](nb::handle_t<Region> self) {
                Region& region = nb::cast<Region&>(self);
                return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(region.base(), {region.layout().region_bytes},
                                                                        self);
            },
            nb::sig("def memory(self) -> numpy.typing.NDArray[numpy.uint8]"),
            "All of it, as bytes. Keeps the mapping alive.")
        .def(
            "submit",
            [](Region& region, int slot, std::uint32_t number) {
                check_slot(slot);
                region.control().submitted[slot].ring(number);
            },
            "slot"_a, "number"_a, "Executor: q, k and v of this slot are ready.")
        .def("wait_completed", &wait_completed, "slot"_a, "number"_a, "iteration"_a, "timeout_s"_a,
             nb::call_guard<nb::gil_scoped_release>(), "Executor: waits for `out` of this slot.")
        .def(
            "refuse",
            [](Region& region, std::uint64_t iteration) {
                region.control().refused_iteration.store(iteration, std::memory_order_release);
                for (auto& bell : region.control().completed) bell.nudge();
            },
            "iteration"_a, "Owner: ends the executor's waits in this iteration.")
        .def_prop_ro("is_attached", &Region::is_attached)
        .def_prop_ro("is_closed", &Region::is_closed)
        .def("peer_alive", &Region::peer_alive, "Whether the other side's process lives and holds the region.")
        .def("close", &Region::close, "Gives the region up; arrays of it stay valid.");
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
                    "sliding_window"_a);
    bind_region(m);
    m.def(
        "try_lock_as_owner", [](int fd) { return try_lock(fd, Side::owner); }, "fd"_a,
        "Takes the owner's byte of an open region file, until that descriptor is closed. False where its owner lives.");
}
