// Computes one iteration over a region: batches through the CPU layers, and decode attention of the layers above them.
//
// Attention comes layer by layer, sub-batch by sub-batch, as the executor submits it, or with CPU layers all layers of
// one sub-batch after the other. It goes before what is left of the CPU layers: the executor waits for each.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "decode_attention.h"
#include "kernels.h"
#include "layers.h"
#include "region.h"
#include "waiter.h"

namespace neoflex {

struct SubBatch {
    int slot;
    std::uint32_t first_submit;  // number on the slot's doorbell before this iteration's first submit
    DecodeBatch decodes;
};

// Layers that an iteration attends for its sub-batches in.
struct LayerRange {
    std::int32_t first;
    std::int32_t count;
    bool in_turn = false;  // all of them for one sub-batch, then for the next; else layer by layer
};

struct IterationTimes {
    std::uint64_t compute_ns;
    std::uint64_t wait_ns;  // for submits
    // Only where asked for, for each piece of work: what it was, when it began to wait, to compute, and had computed.
    // What: 0 for attention, 1 for a CPU layer; the sub-batch by its place, or the batch; the layer.
    std::vector<std::array<std::uint64_t, 4>> trace_ns;
};

// The iteration was given up: the executor is gone, the region was closed or the worker was cancelled.
struct Interrupted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Batches that pass the CPU layers in one iteration, in the order in which they are handed over, all at once.
struct LayerWork {
    std::uint32_t first_batch = 0;  // number on the doorbell before this iteration
    std::vector<LayerBatch> batches;
};

class Worker {
  public:
    // All must outlive the worker; `layers` is null where the region has no CPU layers. Of workers that share threads
    // one runs at a time.
    Worker(Region& region, const Kernel& kernel, ThreadPool& threads, LayerRunner* layers = nullptr);

    // `ringer` is who rings for the sub-batches; batches through the CPU layers are always handed over by a thread.
    // Throws PlaneError where a number is out of range, before any memory is touched, and Interrupted.
    IterationTimes run(const std::vector<SubBatch>& sub_batches, LayerRange layers, bool trace,
                       const LayerWork& work = {}, Ringer ringer = Ringer::thread);

    // Ends the running iteration, and each later one, at its next wait or CPU layer. From any thread.
    void cancel();

    // For how long it has been computing, in a single layer; 0 while it waits or is idle. From any thread.
    std::uint64_t computing_ns() const;

  private:
    void check(const std::vector<SubBatch>& sub_batches, LayerRange layers, const LayerWork& work) const;
    // Why nobody wants the iteration any more; null: somebody does.
    const char* given_up() const;
    void wait(Waiter& waiter, Doorbell& bell, std::uint32_t target, Ringer ringer);
    void attend(const SubBatch& batch, DecodePlan& plan, int layer);

    Region& region_;
    LayerRunner* layers_;
    DecodeAttention attention_;
    ThreadPool& threads_;
    HeadCounts heads_;
    KernelShape kernel_shape_;
    std::vector<std::int32_t> windows_;      // that layers have, each once
    std::vector<std::size_t> layer_window_;  // by layer: which of them
    Waiter waiters_[num_slots];
    Waiter layer_waiter_;
    std::atomic<bool> cancelled_{false};
    std::atomic<std::uint64_t> computing_since_ns_{0};  // 0: it does not
};

}  // namespace neoflex
