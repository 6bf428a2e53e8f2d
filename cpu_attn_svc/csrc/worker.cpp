#include "worker.h"

#include <algorithm>
#include <string>

namespace neoflex {

namespace {

std::uint64_t to_ns(Clock::duration time) {
    return static_cast<std::uint64_t>(std::chrono::duration_cast<nanoseconds>(time).count());
}

// Since the epoch of CLOCK_MONOTONIC, which the executor's clock has, too.
std::uint64_t to_ns(Clock::time_point time) { return to_ns(time.time_since_epoch()); }

HeadCounts heads_of(const Shape& shape) { return {shape.num_q_heads, shape.num_kv_heads}; }

KernelShape kernel_shape_of(const Shape& shape) {
    return make_kernel_shape(heads_of(shape), shape.head_dim, shape.block_tokens, shape.kv_dtype, shape.exchange_dtype,
                             shape.softmax_scale, shape.softcap);
}

void require(bool holds, const std::string& what) {
    if (!holds) throw PlaneError(what);
}

}  // namespace

Worker::Worker(Region& region, const Kernel& kernel, ThreadPool& threads)
    : region_(region),
      attention_(kernel, heads_of(region.shape()), kernel_shape_of(region.shape()), threads),
      threads_(threads),
      heads_(heads_of(region.shape())),
      kernel_shape_(kernel_shape_of(region.shape())) {
    for (int layer = 0; layer < region.shape().num_layers; ++layer) {
        const std::int32_t window = region.shape().sliding_windows[layer];
        const auto known = std::find(windows_.begin(), windows_.end(), window);
        layer_window_.push_back(static_cast<std::size_t>(known - windows_.begin()));
        if (known == windows_.end()) windows_.push_back(window);
    }
}

IterationTimes Worker::run(const std::vector<SubBatch>& sub_batches, LayerRange layers, bool trace) {
    check(sub_batches, layers);
    const int num_threads = threads_.resize();
    std::vector<DecodePlan> plans;
    // One for each kind of layer; layers of a kind share it.
    plans.reserve(sub_batches.size() * windows_.size());
    for (const SubBatch& batch : sub_batches)
        for (const std::int32_t window : windows_)
            plans.emplace_back(batch.decodes, heads_, kernel_shape_, window, num_threads);

    IterationTimes times{};
    if (trace) times.trace_ns.reserve(3 * sub_batches.size() * layers.count);
    auto start = Clock::now();
    const Layout& at = region_.layout();
    const auto q_stride = static_cast<std::size_t>(heads_.num_q_heads) * kernel_shape_.head_dim;
    for (int number = 1; number <= layers.count; ++number) {
        const int layer = layers.first + number - 1;
        for (std::size_t i = 0; i < sub_batches.size(); ++i) {
            const SubBatch& batch = sub_batches[i];
            wait_for_submit(batch, number);
            const auto submitted = Clock::now();
            std::byte* slot = region_.slot(batch.slot);
            DecodePlan& plan = plans[i * windows_.size() + layer_window_[layer]];
            attention_.run(plan, {region_.pool_layer(layer), region_.scales_layer(layer), slot + at.slot_q, q_stride,
                                  slot + at.slot_k, slot + at.slot_v, slot + at.slot_out, q_stride});
            const auto completed = Clock::now();
            region_.control().completed[batch.slot].ring(batch.first_submit + number);
            times.wait_ns += to_ns(submitted - start);
            times.compute_ns += to_ns(completed - submitted);
            if (trace) times.trace_ns.insert(times.trace_ns.end(), {to_ns(start), to_ns(submitted), to_ns(completed)});
            start = completed;
        }
    }
    return times;
}

void Worker::cancel() {
    cancelled_.store(true);
    for (auto& bell : region_.control().submitted) bell.nudge();
}

void Worker::check(const std::vector<SubBatch>& sub_batches, LayerRange layers) const {
    const std::int32_t num_layers = region_.shape().num_layers;
    require(layers.first >= 0 && layers.first < num_layers && layers.count >= 1 &&
                layers.count <= num_layers - layers.first,
            std::to_string(layers.count) + " layers from layer " + std::to_string(layers.first) + " on, of " +
                std::to_string(num_layers));
    bool used[num_slots] = {};
    for (const SubBatch& batch : sub_batches) {
        require(batch.slot >= 0 && batch.slot < num_slots, "slot " + std::to_string(batch.slot));
        require(!used[batch.slot], "slot " + std::to_string(batch.slot) + " twice");
        used[batch.slot] = true;
        check_decodes(batch.decodes, region_.shape(), region_.num_blocks());
    }
}

void Worker::wait_for_submit(const SubBatch& batch, int number) {
    const char* why = nullptr;
    auto interrupted = [&](bool slept_a_slice) {
        if (cancelled_.load(std::memory_order_relaxed)) {
            why = "the region was given up";
        } else if (region_.is_closed()) {
            why = "the executor closed the region";
        } else if (slept_a_slice && !region_.peer_alive()) {
            why = "the executor is gone";
        }
        return why != nullptr;
    };
    const auto result = waiters_[batch.slot].wait(region_.control().submitted[batch.slot],
                                                  batch.first_submit + number, Clock::time_point::max(), interrupted);
    if (result != WaitResult::reached) throw Interrupted(why);
}

}  // namespace neoflex
