// The worker and its kernels over a region: sequences that grow token by token, against attention in double precision.
//
// Every token's k and v pass through the exchange slots, so that the pool's layout stays the kernels' own affair. The
// pool starts as NaN throughout: what is read without having been written shows.
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <thread>

#include "check.h"
#include "exchange.h"
#include "numbers.h"
#include "temporary.h"
#include "worker.h"

using namespace neoflex;

namespace {

using std::chrono::seconds;

// Of an output of about 1, by the type it is rounded to. In int8, keys and values of up to 4 or so are off by some
// hundredths.
double tolerance(const Shape& shape) {
    if (shape.kv_dtype == DType::int8) return 0.25;
    if (shape.exchange_dtype == DType::bf16) return 2e-2;
    return shape.exchange_dtype == DType::fp16 || shape.kv_dtype != DType::fp32 ? 2e-3 : 2e-5;
}

// A region with an executor's side, and a thread that computes as cpu_attn_svc does.
class Rig {
  public:
    Rig(const Shape& shape, const Kernel& kernel, int num_threads, std::int32_t num_blocks)
        : owner_(Region::create(directory_.path("region"), 1, shape,
                                num_blocks * shape.block_bytes(), {})),
          region_(Region::attach(directory_.path("region"), 1, shape)),
          threads_(num_threads),
          worker_(*owner_, kernel, threads_),
          exchange_(*region_) {
        std::memset(owner_->pool_layer(0), 0xff, owner_->layout().pool_bytes);
        if (shape.kv_dtype == DType::int8) std::memset(owner_->scales_layer(0), 0xff, owner_->layout().scales_bytes);
    }

    Worker& worker() { return worker_; }
    Exchange& exchange() { return exchange_; }
    Region& owner() { return *owner_; }

  private:
    TemporaryDirectory directory_;
    std::unique_ptr<Region> owner_;
    std::unique_ptr<Region> region_;
    ThreadPool threads_;
    Worker worker_;
    Exchange exchange_;
};

// Sequences of one sub-batch with all that was ever submitted for them.
class Sequences {
  public:
    Sequences(const Shape& shape, int num_sequences, std::int32_t stride, unsigned seed)
        : shape_(shape), num_(num_sequences), stride_(stride), random_(seed), contexts_(num_sequences),
          tables_(num_sequences * stride), kv_(num_sequences * shape.num_layers * shape.num_kv_heads * 2),
          exchange_bytes_(dtype_bytes(shape.exchange_dtype)) {
        for (std::size_t i = 0; i < tables_.size(); ++i) tables_[i] = static_cast<std::int32_t>(tables_.size() - 1 - i);
    }

    // One more token each, through all layers, in one iteration or two.
    void step(Rig& rig, int slot, std::int32_t layers_first) {
        for (auto& context : contexts_) ++context;
        run(rig, slot, {0, layers_first});
        if (layers_first < shape_.num_layers) run(rig, slot, {layers_first, shape_.num_layers - layers_first});
    }

  private:
    void run(Rig& rig, int slot, LayerRange layers) {
        const SubBatch batch{slot, rig.exchange().num_submits(slot), {num_, contexts_.data(), tables_.data(), stride_}};
        std::thread computing([&] { rig.worker().run({batch}, layers, false); });
        for (int layer = layers.first; layer < layers.first + layers.count; ++layer) {
            std::vector<std::byte> fused(num_ * row_bytes());
            fill(fused, layer);
            const std::size_t head = shape_.head_dim * exchange_bytes_;
            const RowsView q{fused.data(), row_bytes(), head};
            const RowsView k{q.data + shape_.num_q_heads * head, row_bytes(), head};
            const RowsView v{k.data + shape_.num_kv_heads * head, row_bytes(), head};
            rig.exchange().submit(slot, num_, q, k, v);
            CHECK(rig.exchange().wait(slot, seconds(60)) == Outcome::completed);
            std::vector<std::byte> out(num_ * shape_.num_q_heads * head);
            rig.exchange().take(slot, num_, {out.data(), shape_.num_q_heads * head, head});
            check(fused, out, layer);
        }
        computing.join();
    }

    std::size_t row_bytes() const {
        return (shape_.num_q_heads + 2 * shape_.num_kv_heads) * static_cast<std::size_t>(shape_.head_dim) *
               exchange_bytes_;
    }

    std::vector<float>& history(int sequence, int layer, int kv_head, int value) {
        return kv_[((sequence * shape_.num_layers + layer) * shape_.num_kv_heads + kv_head) * 2 + value];
    }

    // Random q, k and v of each sequence; k and v also into the history, rounded as the pool rounds them.
    void fill(std::vector<std::byte>& fused, int layer) {
        std::normal_distribution<float> normal;
        const int num_heads = shape_.num_q_heads + 2 * shape_.num_kv_heads;
        for (int i = 0; i < num_ * num_heads * shape_.head_dim; ++i) {
            const float value = rounded(shape_.exchange_dtype, normal(random_));
            store(shape_.exchange_dtype, fused.data(), i, value);
            const int head = i / shape_.head_dim % num_heads - shape_.num_q_heads;
            if (head < 0) continue;
            history(i / shape_.head_dim / num_heads, layer, head % shape_.num_kv_heads, head / shape_.num_kv_heads)
                .push_back(rounded(shape_.kv_dtype, value));
        }
    }

    void check(const std::vector<std::byte>& fused, const std::vector<std::byte>& out, int layer) {
        const int dim = shape_.head_dim;
        for (int s = 0; s < num_; ++s)
            for (int h = 0; h < shape_.num_q_heads; ++h) {
                const std::byte* q = fused.data() + s * row_bytes() + h * dim * exchange_bytes_;
                const std::vector<double> want = attend(q, history(s, layer, h / shape_.group(), 0),
                                                        history(s, layer, h / shape_.group(), 1),
                                                        shape_.sliding_windows[layer]);
                for (int d = 0; d < dim; ++d) {
                    const float got =
                        load(shape_.exchange_dtype, out.data(), (s * shape_.num_q_heads + h) * std::size_t(dim) + d);
                    CHECK(std::abs(got - want[d]) <= tolerance(shape_));
                }
            }
    }

    std::vector<double> attend(const std::byte* q, const std::vector<float>& k, const std::vector<float>& v,
                               int window) const {
        const int dim = shape_.head_dim;
        const int num_tokens = static_cast<int>(k.size()) / dim;
        const int first = window > 0 ? std::max(0, num_tokens - window) : 0;
        std::vector<double> scores, out(dim);
        for (int t = first; t < num_tokens; ++t) {
            double score = 0;
            for (int d = 0; d < dim; ++d) score += double(load(shape_.exchange_dtype, q, d)) * k[t * dim + d];
            score *= shape_.softmax_scale;
            scores.push_back(shape_.softcap > 0 ? shape_.softcap * std::tanh(score / shape_.softcap) : score);
        }
        const double most = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double& score : scores) sum += score = std::exp(score - most);
        for (int t = first; t < num_tokens; ++t)
            for (int d = 0; d < dim; ++d) out[d] += scores[t - first] / sum * v[t * dim + d];
        return out;
    }

    const Shape shape_;
    const int num_;
    const std::int32_t stride_;
    std::mt19937 random_;
    std::vector<std::int32_t> contexts_;  // [num], the newest token included
    std::vector<std::int32_t> tables_;    // [num, stride]
    std::vector<std::vector<float>> kv_;  // [num, layers, kv heads, 2 (K, V)] of [tokens, head_dim]
    const std::size_t exchange_bytes_;
};

void grow(const Shape& shape, const Kernel& kernel, int num_threads, int num_sequences, int num_tokens) {
    const std::int32_t stride = (num_tokens - 1) / shape.block_tokens + 1;
    Rig rig(shape, kernel, num_threads, stride * num_sequences);
    Sequences sequences(shape, num_sequences, stride, static_cast<unsigned>(num_tokens));
    for (int token = 0; token < num_tokens; ++token) sequences.step(rig, token % num_slots, 1 + token % shape.num_layers);
}

void test_random_shapes(const Kernel& kernel) {
    std::mt19937 random(11);
    auto between = [&](int least, int most) { return least + static_cast<int>(random() % (most - least + 1)); };
    constexpr DType dtypes[] = {DType::fp32, DType::fp16, DType::bf16, DType::int8};
    for (int i = 0; i < 24; ++i) {
        const int num_kv_heads = between(1, 3);
        const int head_dim = between(1, 4) == 1 ? between(1, 256) : 16 * between(1, 8);
        const Shape shape{between(1, 3),
                          num_kv_heads * between(1, 6),
                          num_kv_heads,
                          head_dim,
                          between(1, 20),
                          dtypes[i % 4],
                          dtypes[i / 4 % 3],
                          3,
                          1.0f / std::sqrt(static_cast<float>(head_dim)),
                          i % 5 == 4 ? 3.0f : 0.0f,
                          {i % 4 == 3 ? between(1, 9) : 0, i % 4 > 1 ? between(1, 9) : 0}};
        grow(shape, kernel, 1, between(1, 3), between(1, 40));
    }
}

// Long enough that heads are cut into spans and merged, by more threads than pieces at times.
void test_spans_and_threads(const Kernel& kernel) {
    Shape shape{1, 6, 2, 64, 16, DType::fp32, DType::fp32, 2, 0.125f, 0.0f, {}};
    grow(shape, kernel, 3, 2, 420);
    shape.kv_dtype = DType::int8;
    grow(shape, kernel, 3, 2, 420);
}

void test_what_is_refused(const Kernel& kernel) {
    const Shape shape{1, 2, 1, 8, 4, DType::fp32, DType::fp32, 2, 1.0f, 0.0f, {}};
    Rig rig(shape, kernel, 1, 3);
    const std::int32_t contexts[] = {1, 5, 1}, tables[] = {0, 1, 2};
    auto run = [&](int slot, std::int32_t num, const std::int32_t* context, const std::int32_t* table,
                   LayerRange layers = {0, 1}) {
        return rig.worker().run({{slot, 0, {num, context, table, 1}}}, layers, false);
    };
    const std::int32_t beyond[] = {3}, negative[] = {-1}, nothing[] = {0};
    CHECK_THROWS(run(2, 1, contexts, tables), PlaneError, "slot 2");
    CHECK_THROWS(run(0, 0, contexts, tables), PlaneError, "0 sequences");
    CHECK_THROWS(run(0, 3, contexts, tables), PlaneError, "3 sequences");
    CHECK_THROWS(run(0, 2, contexts, tables), PlaneError, "context of 5 tokens");
    CHECK_THROWS(run(0, 1, nothing, tables), PlaneError, "context of 0 tokens");
    CHECK_THROWS(run(0, 1, contexts, beyond), PlaneError, "block 3 of 3");
    CHECK_THROWS(run(0, 1, contexts, negative), PlaneError, "block -1 of 3");
    for (const LayerRange layers : {LayerRange{0, 2}, {0, 0}, {1, 1}, {-1, 1}, {0, -1}, {2147483647, 2147483647}})
        CHECK_THROWS(run(0, 1, contexts, tables, layers), PlaneError, "layers from layer");
    rig.worker().cancel();
    CHECK_THROWS(run(0, 1, contexts, tables), Interrupted, "given up");
}

// Numbers as a peer may send them: what is not refused computes, and touches nothing but the region.
void test_any_numbers(const Kernel& kernel) {
    constexpr std::int32_t num_blocks = 6;
    const Shape shape{2, 2, 1, 8, 4, DType::fp32, DType::fp32, 2, 1.0f, 0.0f, {0, 3}};
    Rig rig(shape, kernel, 2, num_blocks);
    std::mt19937 random(3);
    constexpr std::int32_t odd[] = {std::numeric_limits<std::int32_t>::min(), -1, 0, 3, num_blocks, 4 * num_blocks,
                                    std::numeric_limits<std::int32_t>::max()};
    auto any = [&](int least, int most) {
        return random() % 12 == 0 ? odd[random() % std::size(odd)]
                                  : least + static_cast<std::int32_t>(random() % (most - least + 1));
    };
    int num_computed = 0, num_refused = 0;
    for (int i = 0; i < 5000; ++i) {
        std::vector<std::int32_t> numbers[2][2];  // contexts and tables
        std::vector<SubBatch> batches;
        const LayerRange layers{any(0, 1), any(1, 2), random() % 2 == 0};
        for (auto& [contexts, tables] : numbers) {
            const auto num = static_cast<std::int32_t>(random() % 3), stride = static_cast<std::int32_t>(random() % 4);
            for (std::int32_t s = 0; s < num; ++s) contexts.push_back(any(1, 8));
            for (std::int32_t b = 0; b < num * stride; ++b) tables.push_back(any(0, num_blocks - 1));
            const auto slot = static_cast<std::int32_t>(batches.size());
            batches.push_back({random() % 12 == 0 ? any(0, 1) : slot, static_cast<std::uint32_t>(random()),
                               {num, contexts.data(), tables.data(), stride}});
            if (random() % 2 == 0) break;
        }
        for (const SubBatch& batch : batches)  // All is there that it could wait for.
            if (batch.slot >= 0 && batch.slot < num_slots)
                rig.owner().control().submitted[batch.slot].ring(batch.first_submit + shape.num_layers);
        try {
            rig.worker().run(batches, layers, random() % 2 == 0);
            ++num_computed;
        } catch (const PlaneError&) {
            ++num_refused;
        }
    }
    CHECK(num_computed > 500);
    CHECK(num_refused > 500);
}

// A device hands over by the number alone and reads the answer's; each iteration counts from 1.
void test_a_device_rings(const Kernel& kernel) {
    const Shape shape{3, 2, 1, 8, 4, DType::fp32, DType::fp32, 2, 1.0f, 0.0f, {}};
    Rig rig(shape, kernel, 1, 3);
    const std::int32_t context = 1, block = 0;
    Control& control = rig.owner().control();
    std::minstd_rand random(1);
    for (int iteration = 1; iteration <= 5; ++iteration) {
        rig.exchange().begin(iteration, true);
        std::thread device([&] {
            for (std::uint32_t number = 1; number <= 6; ++number) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
                const int slot = number % 2;
                const auto value = (number + 1) / 2;
                control.submitted[slot].number.store(value, std::memory_order_release);
                while (!control.completed[slot].reached(value)) std::this_thread::yield();
            }
        });
        const DecodeBatch decodes{1, &context, &block, 1};
        rig.worker().run({{1, 0, decodes}, {0, 0, decodes}}, {0, 3}, false, {}, Ringer::device);
        device.join();
        CHECK(rig.exchange().numbers(0) == std::make_pair(3u, 3u) && rig.exchange().numbers(1) == std::make_pair(3u, 3u));
    }
}

void test_an_executor_that_closes_ends_the_iteration(const Kernel& kernel) {
    const Shape shape{1, 2, 1, 8, 4, DType::fp32, DType::fp32, 2, 1.0f, 0.0f, {}};
    Rig rig(shape, kernel, 1, 3);
    const std::int32_t context = 1, block = 0;
    std::thread closing([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        rig.owner().close();
    });
    CHECK_THROWS(rig.worker().run({{0, 0, {1, &context, &block, 1}}}, {0, 1}, false), Interrupted, "closed the region");
    closing.join();
}

}  // namespace

int main() {
    for (const Kernel* kernel : runnable_kernels()) {
        std::printf("kernel %s\n", kernel->name);
        test_random_shapes(*kernel);
        test_spans_and_threads(*kernel);
    }
    test_what_is_refused(scalar_kernel);
    for (const Kernel* kernel : runnable_kernels()) test_any_numbers(*kernel);
    test_a_device_rings(scalar_kernel);
    test_an_executor_that_closes_ends_the_iteration(scalar_kernel);
}
