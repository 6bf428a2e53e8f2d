// A region between two processes: made, attached, refused, left by a peer that closes, is killed or is stopped.
#include <signal.h>
#include <sys/wait.h>

#include <functional>
#include <vector>

#include "check.h"
#include "exchange.h"
#include "temporary.h"

using namespace neoflex;

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Shape shape{2, 6, 2, 24, 4, DType::fp16, DType::fp32, 5, 0.25f, 0.0f, {}};
constexpr std::uint64_t epoch = 7;
constexpr std::size_t pool_bytes = 100'000;

// A child process that does `work`, says so, and stays until it is killed.
class Child {
  public:
    explicit Child(const std::function<void()>& work) {
        int ends[2];
        CHECK(pipe(ends) == 0);
        pid_ = fork();
        CHECK(pid_ >= 0);
        if (pid_ == 0) {
            work();
            CHECK(write(ends[1], "x", 1) == 1);
            for (;;) pause();
        }
        char byte = 0;
        CHECK(read(ends[0], &byte, 1) == 1);
        close(ends[0]);
        close(ends[1]);
    }
    ~Child() { end(); }

    void stop() const { CHECK(kill(pid_, SIGSTOP) == 0); }
    void end() {
        if (pid_ == 0) return;
        CHECK(kill(pid_, SIGKILL) == 0);
        CHECK(waitpid(pid_, nullptr, 0) == pid_);
        pid_ = 0;
    }

  private:
    pid_t pid_;
};

void test_attach_refuses_what_was_not_asked_for() {
    const TemporaryDirectory directory;
    const auto owner = Region::create(directory.path("region"), epoch, shape, pool_bytes, {});
    CHECK(owner->num_blocks() == static_cast<int>(pool_bytes / (shape.num_layers * shape.layer_block_bytes())));
    CHECK_THROWS(Region::create(directory.path("region"), epoch, shape, pool_bytes, {}), PlaneError, "File exists");
    CHECK_THROWS(Region::attach(directory.path("other"), epoch, shape), PlaneError, "No such file");
    CHECK_THROWS(Region::attach(directory.path("region"), epoch + 1, shape), PlaneError, "epoch 7, expected 8");
    Shape other = shape;
    other.head_dim = 16;
    CHECK_THROWS(Region::attach(directory.path("region"), epoch, other), PlaneError, "another shape");
    CHECK(!owner->is_attached());
    const auto executor = Region::attach(directory.path("region"), epoch, shape);
    CHECK_THROWS(Region::attach(directory.path("region"), epoch, shape), PlaneError, "another executor");
    CHECK(owner->is_attached() && owner->peer_alive() && executor->peer_alive());
    executor->pool_layer(1)[3] = std::byte{42};
    CHECK(owner->pool_layer(1)[3] == std::byte{42});
    owner->close();
    CHECK(executor->is_closed() && !executor->peer_alive());
}

void test_a_region_that_fits_nowhere_leaves_no_file() {
    const TemporaryDirectory directory;
    CHECK_THROWS(Region::create(directory.path("region"), epoch, shape, 10, {}), PlaneError, "holds no block");
    Shape large = shape;
    large.block_tokens = 4096;
    CHECK_THROWS(Region::create(directory.path("region"), epoch, large, std::size_t{1} << 42, {}), PlaneError,
                 "cannot reserve");
    CHECK(access(directory.path("region").c_str(), F_OK) != 0);
}

void test_an_executor_that_is_killed() {
    const TemporaryDirectory directory;
    const std::string path = directory.path("region");
    const auto owner = Region::create(path, epoch, shape, pool_bytes, {});
    Child child([&] { Region::attach(path, epoch, shape).release(); });
    CHECK(owner->is_attached() && owner->peer_alive());
    child.stop();
    CHECK(owner->peer_alive());
    child.end();
    CHECK(!owner->peer_alive());
}

void test_an_owner_that_is_killed_ends_a_wait() {
    const TemporaryDirectory directory;
    const std::string path = directory.path("region");
    Child child([&] { Region::create(path, epoch, shape, pool_bytes, {}).release(); });
    const auto region = Region::attach(path, epoch, shape);
    Exchange exchange(*region);
    CHECK(exchange.wait(0, nanoseconds(0)) == Outcome::completed);  // nothing was submitted
    exchange.ring(0);
    child.stop();
    CHECK(exchange.wait(0, milliseconds(60)) == Outcome::timed_out);
    child.end();
    CHECK(exchange.wait(0, seconds(20)) == Outcome::peer_lost);
    CHECK_THROWS(Region::attach(path, epoch, shape), PlaneError, "another executor");
}

// Rows as a matrix product leaves them: q, k and v of a token beside one another, heads apart.
void test_rows_of_any_stride_are_copied() {
    const TemporaryDirectory directory;
    const auto owner = Region::create(directory.path("region"), epoch, shape, pool_bytes, {});
    const auto region = Region::attach(directory.path("region"), epoch, shape);
    Exchange exchange(*region);
    const std::size_t head = 24 * sizeof(float);
    for (const std::size_t apart : {head, head + 8}) {
        const std::size_t row = 10 * apart + 4;
        std::vector<std::byte> fused(5 * row);
        for (std::size_t i = 0; i < fused.size(); ++i) fused[i] = static_cast<std::byte>(i * 7);
        const RowsView q{fused.data(), row, apart};
        const RowsView k{fused.data() + 6 * apart, row, apart};
        const RowsView v{fused.data() + 8 * apart, row, apart};
        exchange.submit(1, 5, q, k, v);
        const std::byte* slot = owner->slot(1);
        for (std::size_t token = 0; token < 5; ++token)
            for (std::size_t i = 0; i < 10; ++i) {
                const std::size_t at = i < 6   ? owner->layout().slot_q + (token * 6 + i) * head
                                       : i < 8 ? owner->layout().slot_k + (token * 2 + i - 6) * head
                                               : owner->layout().slot_v + (token * 2 + i - 8) * head;
                CHECK(std::memcmp(slot + at, fused.data() + token * row + i * apart, head) == 0);
            }
        std::memcpy(owner->slot(1) + owner->layout().slot_out, slot + owner->layout().slot_q, 5 * 6 * head);
        owner->control().completed[1].ring(exchange.num_submits(1));
        CHECK(exchange.wait(1, nanoseconds(0)) == Outcome::completed);
        std::vector<std::byte> out(5 * row);
        exchange.take(1, 5, {out.data(), row, apart});
        for (std::size_t token = 0; token < 5; ++token)
            for (std::size_t i = 0; i < 6; ++i)
                CHECK(std::memcmp(&out[token * row + i * apart], &fused[token * row + i * apart], head) == 0);
    }
    CHECK(exchange.num_submits(1) == 2 && exchange.num_submits(0) == 0);
    exchange.begin(9, false);
    owner->control().refused_iteration.store(9);
    exchange.ring(0);
    CHECK(exchange.wait(0, seconds(20)) == Outcome::refused);
    exchange.begin(10, false);
    owner->close();
    CHECK(exchange.wait(0, seconds(20)) == Outcome::peer_lost);
}

// As a device rings: by the numbers alone, from 0 in each iteration.
void test_a_device_that_waits_is_let_go() {
    TemporaryDirectory directory;
    const std::string path = directory.path("region");
    const auto owner = Region::create(path, epoch, shape, pool_bytes, {});
    const auto region = Region::attach(path, epoch, shape);
    Exchange exchange(*region);
    exchange.ring(0);
    exchange.begin(1, true);
    CHECK(exchange.num_submits(0) == 0 && exchange.numbers(0) == std::make_pair(0u, 0u));
    region->control().submitted[1].number.store(2);
    owner->control().completed[1].ring(1);
    CHECK(exchange.numbers(1) == std::make_pair(2u, 1u));
    CHECK(exchange.outlook() == Outcome::completed);
    exchange.begin(2, true);
    CHECK(exchange.numbers(1) == std::make_pair(0u, 0u));
    owner->control().refused_iteration.store(2);
    CHECK(exchange.outlook() == Outcome::refused);
    exchange.release_device();
    for (const std::uint32_t awaited : {1u, 1000u, 0x7fffffffu}) CHECK(region->control().completed[0].reached(awaited));
    exchange.begin(3, true);
    owner->close();
    CHECK(exchange.outlook() == Outcome::peer_lost);
}

}  // namespace

int main() {
    test_attach_refuses_what_was_not_asked_for();
    test_a_region_that_fits_nowhere_leaves_no_file();
    test_an_executor_that_is_killed();
    test_an_owner_that_is_killed_ends_a_wait();
    test_rows_of_any_stride_are_copied();
    test_a_device_that_waits_is_let_go();
}
