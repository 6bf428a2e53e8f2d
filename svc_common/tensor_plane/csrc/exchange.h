// The executor's side of the exchange slots: hands over q, k and v of a layer, waits for and takes back its attention.
#pragma once

#include <cstring>
#include <string>
#include <utility>

#include "region.h"
#include "waiter.h"

namespace neoflex {

// Rows of [num_heads, head_dim] in somebody else's memory. Each head is contiguous; rows and heads need not be.
struct RowsView {
    std::byte* data;
    std::size_t row_bytes;   // from one row to the next
    std::size_t head_bytes;  // from one head to the next
};

enum class Outcome { completed, timed_out, peer_lost, refused };

// Of one slot in an iteration that a device rings in: half the circle.
inline constexpr std::uint32_t most_submits = 0x7fffffff;

// Used by one thread at a time.
class Exchange {
  public:
    explicit Exchange(Region& region) : region_(region) {}

    // Submits so far of a slot, modulo 2^32.
    std::uint32_t num_submits(int slot) const { return num_submits_[slot]; }

    // Waits belong to this iteration from now on. A worker that reads no numbers any more, since its report of the
    // iteration before has come, has them start from 0 where a device is to ring.
    void begin(std::uint64_t iteration, bool device_rings) {
        iteration_ = iteration;
        if (!device_rings) return;
        Control& control = region_.control();
        for (int slot = 0; slot < num_slots; ++slot) {
            control.submitted[slot].reset();
            control.completed[slot].reset();
            num_submits_[slot] = 0;
        }
    }

    // Of an iteration that a device rings in: how many layers a slot has submitted, and how many are answered.
    std::pair<std::uint32_t, std::uint32_t> numbers(int slot) const {
        const Control& control = region_.control();
        // Read in this order: what is answered was submitted before.
        const std::uint32_t completed = control.completed[slot].number.load(std::memory_order_acquire);
        return {control.submitted[slot].number.load(std::memory_order_acquire), completed};
    }

    // Whether the worker has refused this iteration or is no more; completed: neither.
    Outcome outlook() const {
        if (region_.control().refused_iteration.load(std::memory_order_acquire) == iteration_) return Outcome::refused;
        return region_.is_closed() || !region_.peer_alive() ? Outcome::peer_lost : Outcome::completed;
    }

    // Ends all waits of a device in this iteration: no answer will come, and what it does from here on is for nothing.
    void release_device() {
        for (auto& bell : region_.control().completed) bell.ring(most_submits);
    }

    // Copies the first rows of a slot's q, k and v and rings.
    void submit(int slot, std::size_t num_rows, const RowsView& q, const RowsView& k, const RowsView& v) {
        const Layout& at = region_.layout();
        std::byte* to = region_.slot(slot);
        const Shape& shape = region_.shape();
        copy(dense(to + at.slot_q, shape.num_q_heads), q, num_rows, shape.num_q_heads);
        copy(dense(to + at.slot_k, shape.num_kv_heads), k, num_rows, shape.num_kv_heads);
        copy(dense(to + at.slot_v, shape.num_kv_heads), v, num_rows, shape.num_kv_heads);
        ring(slot);
    }

    // q, k and v of this slot are in place.
    void ring(int slot) { region_.control().submitted[slot].ring(++num_submits_[slot]); }

    // Whether the slot's last submit is answered already.
    bool is_completed(int slot) const { return region_.control().completed[slot].reached(num_submits_[slot]); }

    // Waits until it is.
    Outcome wait(int slot, nanoseconds timeout) {
        return wait(waiters_[slot], region_.control().completed[slot], num_submits_[slot], timeout);
    }

    // Batches handed over to the CPU layers so far, modulo 2^32.
    std::uint32_t num_layer_batches() const { return num_layer_batches_; }

    // The hidden states of so many more of them are in place.
    void submit_layers(std::uint32_t num_batches) {
        num_layer_batches_ += num_batches;
        region_.control().layers_submitted.ring(num_layer_batches_);
    }

    // Waits until the first `num_batches` of all are through.
    Outcome wait_layers(std::uint32_t num_batches, nanoseconds timeout) {
        return wait(layer_waiter_, region_.control().layers_completed, num_batches, timeout);
    }

    // Copies the first rows of a slot's out.
    void take(int slot, std::size_t num_rows, const RowsView& out) const {
        const std::int32_t heads = region_.shape().num_q_heads;
        copy(out, dense(region_.slot(slot) + region_.layout().slot_out, heads), num_rows, heads);
    }

    // In all waits so far.
    nanoseconds waited() const { return waited_; }
    const Region& region() const { return region_; }

  private:
    Outcome wait(Waiter& waiter, Doorbell& bell, std::uint32_t target, nanoseconds timeout) {
        const auto start = Clock::now();
        Control& control = region_.control();
        Outcome end = Outcome::timed_out;
        auto interrupted = [&](bool slept_a_slice) {
            if (control.refused_iteration.load(std::memory_order_acquire) == iteration_) {
                end = Outcome::refused;
            } else if (region_.is_closed() || (slept_a_slice && !region_.peer_alive())) {
                end = Outcome::peer_lost;
            } else {
                return false;
            }
            return true;
        };
        const auto result = waiter.wait(bell, target, start + timeout, interrupted);
        waited_ += Clock::now() - start;
        return result == WaitResult::reached ? Outcome::completed : end;
    }

    std::size_t head_bytes() const {
        return static_cast<std::size_t>(region_.shape().head_dim) * dtype_bytes(region_.shape().exchange_dtype);
    }

    RowsView dense(std::byte* data, std::int32_t num_heads) const {
        return {data, num_heads * head_bytes(), head_bytes()};
    }

    void copy(const RowsView& to, const RowsView& from, std::size_t num_rows, std::size_t num_heads) const {
        const std::size_t head = head_bytes();
        const bool whole_rows = to.head_bytes == head && from.head_bytes == head;
        if (whole_rows && to.row_bytes == num_heads * head && from.row_bytes == num_heads * head) {
            std::memcpy(to.data, from.data, num_rows * num_heads * head);
            return;
        }
        const std::size_t pieces = whole_rows ? 1 : num_heads;
        const std::size_t piece_bytes = whole_rows ? num_heads * head : head;
        for (std::size_t row = 0; row < num_rows; ++row)
            for (std::size_t piece = 0; piece < pieces; ++piece)
                std::memcpy(to.data + row * to.row_bytes + piece * to.head_bytes,
                            from.data + row * from.row_bytes + piece * from.head_bytes, piece_bytes);
    }

    Region& region_;
    std::uint64_t iteration_ = 0;
    std::uint32_t num_submits_[num_slots] = {};
    std::uint32_t num_layer_batches_ = 0;
    Waiter waiters_[num_slots];
    Waiter layer_waiter_;
    nanoseconds waited_{0};
};

}  // namespace neoflex
