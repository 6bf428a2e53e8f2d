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

// See IterationTimes.
std::uint64_t trace_code(std::uint64_t kind, std::size_t index, int layer) {
    return kind << 32 | static_cast<std::uint64_t>(index) << 16 | static_cast<std::uint64_t>(layer);
}

// Holds a time for as long as it lives, then 0.
class SinceWhen {
  public:
    SinceWhen(std::atomic<std::uint64_t>& place, std::uint64_t ns) : place_(place) {
        place_.store(ns, std::memory_order_relaxed);
    }
    ~SinceWhen() { place_.store(0, std::memory_order_relaxed); }

  private:
    std::atomic<std::uint64_t>& place_;
};

}  // namespace

Worker::Worker(Region& region, const Kernel& kernel, ThreadPool& threads, LayerRunner* layers)
    : region_(region),
      layers_(layers),
      attention_(kernel, heads_of(region.shape()), kernel_shape_of(region.shape()), threads),
      threads_(threads),
      heads_(heads_of(region.shape())),
      kernel_shape_(kernel_shape_of(region.shape())) {
    require(layers != nullptr || region.shape().num_cpu_layers == 0, "the region's CPU layers are not loaded");
    for (int layer = 0; layer < region.shape().num_layers; ++layer) {
        const std::int32_t window = region.shape().sliding_windows[layer];
        const auto known = std::find(windows_.begin(), windows_.end(), window);
        layer_window_.push_back(static_cast<std::size_t>(known - windows_.begin()));
        if (known == windows_.end()) windows_.push_back(window);
    }
}

IterationTimes Worker::run(const std::vector<SubBatch>& sub_batches, LayerRange layers, bool trace,
                           const LayerWork& work, Ringer ringer) {
    check(sub_batches, layers, work);
    const int num_threads = threads_.resize();
    std::vector<DecodePlan> plans;
    // One for each kind of layer; layers of a kind share it.
    plans.reserve(sub_batches.size() * windows_.size());
    for (const SubBatch& batch : sub_batches)
        for (const std::int32_t window : windows_)
            plans.emplace_back(batch.decodes, heads_, kernel_shape_, window, num_threads);

    Control& control = region_.control();
    const bool by_layer = !layers.in_turn;
    const std::size_t num_submits = sub_batches.size() * layers.count;
    const std::size_t per_layer = std::max<std::size_t>(sub_batches.size(), 1);
    const std::size_t per_sub_batch = std::max(layers.count, 1);
    const auto all_batches = static_cast<std::uint32_t>(work.first_batch + work.batches.size());
    std::size_t submit = 0, batch = 0;  // what comes next of either work
    std::int32_t batch_layer = 0;       // of that batch
    IterationTimes times{};
    auto start = Clock::now();
    while (submit < num_submits || batch < work.batches.size()) {
        const std::size_t place = by_layer ? submit % per_layer : submit / per_sub_batch;
        const std::size_t turn = by_layer ? submit / per_layer : submit % per_sub_batch;
        const auto number = static_cast<std::uint32_t>(turn + 1);
        bool attends = submit < num_submits;
        if (batch < work.batches.size()) {
            // Attention is handed over only after all batches; where none is there yet, a layer goes on meanwhile.
            wait(layer_waiter_, control.layers_submitted, all_batches, Ringer::thread);
            attends = attends && control.submitted[sub_batches[place].slot].reached(sub_batches[place].first_submit + number);
        } else {
            const SubBatch& next = sub_batches[place];
            wait(waiters_[next.slot], control.submitted[next.slot], next.first_submit + number, ringer);
        }
        const auto begun = Clock::now();
        const SinceWhen computing(computing_since_ns_, to_ns(begun));
        std::array<std::uint64_t, 4> event{};
        if (attends) {
            const int layer = layers.first + static_cast<int>(turn);
            attend(sub_batches[place], plans[place * windows_.size() + layer_window_[layer]], layer);
            control.completed[sub_batches[place].slot].ring(sub_batches[place].first_submit + number);
            event[0] = trace_code(0, place, layer);
            ++submit;
        } else {
            const LayerBatch& passing = work.batches[batch];
            if (const char* why = given_up()) throw Interrupted(why);
            if (batch_layer == 0) layers_->begin(passing);
            layers_->run_layer(batch_layer);
            event[0] = trace_code(1, batch, batch_layer);
            if (++batch_layer == passing.num_layers) {
                batch_layer = 0;
                control.layers_completed.ring(static_cast<std::uint32_t>(work.first_batch + ++batch));
            }
        }
        const auto completed = Clock::now();
        times.wait_ns += to_ns(begun - start);
        times.compute_ns += to_ns(completed - begun);
        if (trace) times.trace_ns.push_back({event[0], to_ns(start), to_ns(begun), to_ns(completed)});
        start = completed;
    }
    return times;
}

void Worker::attend(const SubBatch& batch, DecodePlan& plan, int layer) {
    const Layout& at = region_.layout();
    const auto q_stride = static_cast<std::size_t>(heads_.num_q_heads) * kernel_shape_.head_dim;
    std::byte* slot = region_.slot(batch.slot);
    attention_.run(plan, {region_.pool_layer(layer), region_.scales_layer(layer), slot + at.slot_q, q_stride,
                          slot + at.slot_k, slot + at.slot_v, slot + at.slot_out, q_stride});
}

void Worker::cancel() {
    cancelled_.store(true);
    for (auto& bell : region_.control().submitted) bell.nudge();
    region_.control().layers_submitted.nudge();
}

std::uint64_t Worker::computing_ns() const {
    const std::uint64_t since_ns = computing_since_ns_.load(std::memory_order_relaxed);
    const std::uint64_t now_ns = to_ns(Clock::now());
    return since_ns == 0 || now_ns < since_ns ? 0 : now_ns - since_ns;
}

void Worker::check(const std::vector<SubBatch>& sub_batches, LayerRange layers, const LayerWork& work) const {
    const std::int32_t num_layers = region_.shape().num_layers;
    const std::int32_t lowest = region_.shape().num_cpu_layers;
    const bool exist = layers.first >= lowest && layers.first < num_layers && layers.count >= 1 &&
                       layers.count <= num_layers - layers.first;
    require(exist || (sub_batches.empty() && layers.count >= 0),
            std::to_string(layers.count) + " layers from layer " + std::to_string(layers.first) + " on, of " +
                std::to_string(num_layers) + " with " + std::to_string(lowest) + " on the CPU");
    bool used[num_slots] = {};
    for (const SubBatch& batch : sub_batches) {
        require(batch.slot >= 0 && batch.slot < num_slots, "slot " + std::to_string(batch.slot));
        require(!used[batch.slot], "slot " + std::to_string(batch.slot) + " twice");
        used[batch.slot] = true;
        check_decodes(batch.decodes, region_.shape(), region_.num_blocks());
    }
    require(work.batches.empty() || layers_ != nullptr, "the region has no CPU layers");
    for (const LayerBatch& batch : work.batches) layers_->check(batch);
}

const char* Worker::given_up() const {
    if (cancelled_.load(std::memory_order_relaxed)) return "the region was given up";
    return region_.is_closed() ? "the executor closed the region" : nullptr;
}

void Worker::wait(Waiter& waiter, Doorbell& bell, std::uint32_t target, Ringer ringer) {
    const char* why = nullptr;
    auto interrupted = [&](bool slept_a_slice) {
        why = given_up();
        if (why == nullptr && slept_a_slice && !region_.peer_alive()) why = "the executor is gone";
        return why != nullptr;
    };
    const WaitResult end = waiter.wait(bell, target, Clock::time_point::max(), interrupted, ringer);
    if (end != WaitResult::reached) throw Interrupted(why);
}

}  // namespace neoflex
