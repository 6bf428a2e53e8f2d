// Computes one iteration over a region, all layers or some: layer by layer, sub-batch by sub-batch, as the executor submits them.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "decode_attention.h"
#include "kernels.h"
#include "region.h"
#include "waiter.h"

namespace neoflex {

struct SubBatch {
    int slot;
    std::uint32_t first_submit;  // number on the slot's doorbell before this iteration's first submit
    DecodeBatch decodes;
};

// Layers that an iteration takes its sub-batches through.
struct LayerRange {
    std::int32_t first;
    std::int32_t count;
};

struct IterationTimes {
    std::uint64_t compute_ns;
    std::uint64_t wait_ns;  // for submits
    // Only where asked for, three for each sub-batch of each layer: when it began to wait, to attend, and had attended.
    std::vector<std::uint64_t> trace_ns;
};

// The iteration was given up: the executor is gone, the region was closed or the worker was cancelled.
struct Interrupted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Worker {
  public:
    // Region and threads must outlive the worker. Of workers that share threads one runs at a time.
    Worker(Region& region, const Kernel& kernel, ThreadPool& threads);

    // Throws PlaneError where a number is out of range, before any memory is touched, and Interrupted.
    IterationTimes run(const std::vector<SubBatch>& sub_batches, LayerRange layers, bool trace);

    // Ends the running iteration, and each later one, at its next wait. From any thread.
    void cancel();

  private:
    void check(const std::vector<SubBatch>& sub_batches, LayerRange layers) const;
    // `number` counts the iteration's submits to the batch's slot from 1.
    void wait_for_submit(const SubBatch& batch, int number);

    Region& region_;
    DecodeAttention attention_;
    ThreadPool& threads_;
    HeadCounts heads_;
    KernelShape kernel_shape_;
    std::vector<std::int32_t> windows_;      // that layers have, each once
    std::vector<std::size_t> layer_window_;  // by layer: which of them
    Waiter waiters_[num_slots];
    std::atomic<bool> cancelled_{false};
};

}  // namespace neoflex
