"""CoreController on a fabricated machine: where it ends up, that it stays there, and what it makes of changes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from planner_svc.cores import CoreController, ThreadLimits
from planner_svc.cpu_load import Sample

NUM_CORES = 64
HOUR_S = 3600.0


def linear(num_threads: int) -> float:
    return num_threads


@dataclass
class Machine:
    """Iterations of `gpu_s` beside attention; both in seconds of one thread where `speedup` is 1."""

    controller: CoreController
    num_threads: int = 1
    gpu_s: float = 0.05
    hidden_s: float = 0.05
    """Of the attention, the part that something else runs beside."""
    attention_s: float = 0.05
    """For each of the host's sequences; 0: the CPU has nothing to do."""
    num_on_host: int = 1
    num_attended: int = 1
    speedup: Callable[[int], float] = linear
    gpu_slowdown: Callable[[int], float] = lambda num_threads: 1.0
    """Where both processors share their cores."""
    noise: float = 0.0
    now: float = 0.0
    num_iterations: int = 0
    history: list[int] = field(default_factory=list)
    """Threads after each change."""
    random: Random = field(default_factory=lambda: Random(7))

    def __post_init__(self) -> None:
        self.controller.note(self.num_threads, NUM_CORES, self.now)

    def run(self, duration_s: float) -> None:
        """As CoreKeeper does it: each iteration is told, and each second asks for a decision."""
        end_s, look_s = self.now + duration_s, self.now + 1
        while self.now < end_s:
            sample = self._iterate()
            self.num_iterations += 1
            self.now += sample.total_s
            self.controller.observe(sample, self.now)
            if self.now >= look_s:
                look_s = self.now + 1
                self._look()

    def _iterate(self) -> Sample:
        attention_s = self.num_attended * self.attention_s / self.speedup(self.num_threads)
        gpu_s = self.gpu_s * self.gpu_slowdown(self.num_threads)
        attention_s *= 1 + self.random.uniform(-self.noise, self.noise)
        gpu_s *= 1 + self.random.uniform(-self.noise, self.noise)
        wait_s = max(0.0, attention_s - self.hidden_s)
        num_left_out = self.num_on_host - self.num_attended
        num_tokens = 1000 * self.num_attended if attention_s else 0
        return Sample(gpu_s + wait_s, wait_s, attention_s, num_tokens, self.num_attended, num_left_out)

    def _look(self) -> None:
        self.controller.note(self.num_threads, NUM_CORES, self.now)
        change = self.controller.decide(self.now, self.attention_s > 0)
        if change:
            assert change.num_threads != self.num_threads
            self.num_threads = change.num_threads
            self.history.append(change.num_threads)
            self.controller.done(change, self.now)


def machine(least: int = 1, most: int | None = None, **figures: object) -> Machine:
    return Machine(CoreController(ThreadLimits(least, most)), **figures)  # type: ignore[arg-type]


def test_threads_grow_until_attention_is_hidden_and_shrink_with_the_load() -> None:
    rig = machine(attention_s=0.3)
    rig.run(HOUR_S)
    # 300 ms of attention beside 50 ms: six threads hide it, and it is doubled on the way.
    assert rig.history == [2, 4, 6]
    rig.attention_s = 0.1
    rig.run(HOUR_S)
    assert rig.num_threads == 3  # 100 / 3 ms is within 70 % of 50 ms.
    rig.attention_s = 0.3
    rig.run(HOUR_S)
    assert rig.num_threads == 6
    rig.attention_s = 0.0
    rig.run(60)
    assert rig.num_threads == 1


def test_limits_hold_whatever_the_load() -> None:
    rig = machine(least=2, most=4, attention_s=10.0)
    rig.run(600)
    assert (rig.controller.limits, rig.num_threads) == ((2, 4), 4)
    rig.attention_s = 0.0
    rig.run(60)
    assert rig.num_threads == 2
    assert set(rig.history) <= {2, 3, 4}


def test_the_service_may_allow_fewer_than_configured() -> None:
    rig = machine(least=100, most=200)
    assert rig.controller.limits == (NUM_CORES, NUM_CORES)
    assert machine().controller.limits == (1, NUM_CORES)
    assert CoreController(ThreadLimits(1, None)).limits is None  # Not known yet.


def test_a_wait_that_is_no_attention_needs_no_threads() -> None:
    controller = CoreController(ThreadLimits(1, None))
    rig = Machine(controller)
    hop = Sample(total_s=0.05, cpu_wait_s=0.02, cpu_attention_s=0.001, cpu_tokens=10, num_attended=1, num_left_out=0)
    for _ in range(1000):
        rig.now += hop.total_s
        controller.observe(hop, rig.now)
        assert controller.decide(rig.now, True) is None


def test_threads_that_do_not_help_are_given_back_and_tried_ever_less_often() -> None:
    # Memory is read no faster by more than three threads.
    rig = machine(attention_s=0.6, speedup=lambda num_threads: min(num_threads, 3))
    rig.run(60)
    assert rig.num_threads in (3, 4)
    rig.run(HOUR_S)
    assert rig.num_threads in (3, 4)
    settled = len(rig.history)
    rig.run(HOUR_S)
    assert len(rig.history) - settled <= 20


def test_threads_that_take_the_executors_cores_are_given_back() -> None:
    rig = machine(attention_s=0.1, gpu_slowdown=lambda num_threads: 1.0 if num_threads == 1 else 3.0)
    rig.run(10)
    assert rig.history == [2, 1]
    rig.run(HOUR_S - 10)
    # Tried again after 1, 2, 4, 8, 16 and 16 minutes.
    assert rig.history == [2, 1] * 7


@pytest.mark.parametrize("attention_s", [0.01, 0.055, 0.08, 0.2, 1.0])
@pytest.mark.parametrize("hidden_s", [0.02, 0.05])
@pytest.mark.parametrize("speedup", [linear, lambda num_threads: num_threads**0.7])
def test_noise_makes_no_oscillation(attention_s: float, hidden_s: float, speedup: Callable[[int], float]) -> None:
    """`hidden_s` below `gpu_s`: attention runs beside a part of the iteration only, as in one batch."""
    rig = machine(attention_s=attention_s, hidden_s=hidden_s, speedup=speedup, noise=0.3)
    rig.run(HOUR_S)
    assert len(rig.history) <= 20
    # What comes late in the hour are the rare tries of one more.
    settled = len(rig.history)
    rig.run(HOUR_S / 2)
    assert len(rig.history) - settled <= 4


@pytest.mark.parametrize("attention_s", [0.01, 0.055, 0.3, 1.0])
@pytest.mark.parametrize("speedup", [linear, lambda num_threads: min(num_threads, 3)])
def test_it_comes_close_to_the_best_fixed_number(attention_s: float, speedup: Callable[[int], float]) -> None:
    elastic = machine(attention_s=attention_s, speedup=speedup, noise=0.3)
    elastic.run(600)
    fixed = [
        Machine(CoreController(None), num_threads=n, attention_s=attention_s, speedup=speedup, noise=0.3)
        for n in (1, 2, 3, 4, 6, 8, 16, 24, 32, 64)
    ]
    for rig in fixed:
        rig.run(60)
    # The first seconds, with one thread, included.
    assert elastic.num_iterations >= 0.9 * 10 * max(rig.num_iterations for rig in fixed)


def test_sequences_that_are_left_out_call_for_threads() -> None:
    # The planner attends for no more than what is hidden.
    rig = machine(num_on_host=8, num_attended=1, attention_s=0.045)

    def fits() -> int:
        return min(8, int(rig.num_threads * rig.hidden_s / rig.attention_s))

    for _ in range(60):
        rig.num_attended = fits()
        rig.run(1)
    assert (rig.num_attended, rig.num_threads) == (8, 8)
    assert rig.history == [2, 4, 8]


def test_sequences_left_out_by_choice_call_for_none() -> None:
    rig = machine(num_on_host=8, num_attended=1, attention_s=0.01)
    rig.run(60)
    assert rig.history == []


def test_a_change_by_somebody_else_is_where_it_goes_on() -> None:
    rig = machine(attention_s=0.3)
    rig.run(60)
    rig.num_threads = 1  # The service has restarted, say.
    rig.run(60)
    assert rig.history == [2, 4, 6, 2, 4, 6]
    rig.num_threads = 12
    rig.run(60)
    assert rig.num_threads == 9  # 300 / 9 ms are within 70 % of 50 ms.


def test_without_limits_nothing_is_decided_and_the_scale_follows() -> None:
    controller = CoreController(None)
    rig = Machine(controller, attention_s=0.6, speedup=lambda num_threads: num_threads**0.5)
    controller.measured_with(1)
    assert (controller.limits, controller.cpu_scale) == (None, 1.0)
    rig.run(10)
    rig.num_threads = 4
    rig.run(1.5)
    assert controller.cpu_scale == 0.25  # Nothing better is known yet.
    rig.run(10)
    assert rig.history == []
    assert controller.cpu_scale == pytest.approx(0.5)  # As measured.
    rig.num_threads = 16
    rig.run(1.5)
    assert controller.cpu_scale == pytest.approx(0.125)  # Four times as fast as four.
    rig.run(10)
    assert controller.cpu_scale == pytest.approx(0.25)
    rig.num_threads = 4
    rig.run(1.5)
    assert controller.cpu_scale == pytest.approx(0.5)  # As before.
    rig.run(10)
    controller.measured_with(4)
    assert controller.cpu_scale == 1.0
    rig.num_threads = 1
    rig.run(10)
    assert controller.cpu_scale == pytest.approx(2.0)


def test_a_load_that_changes_with_the_threads_does_not_pass_for_their_speed() -> None:
    controller = CoreController(None)
    rig = Machine(controller, attention_s=0.4)
    controller.measured_with(1)
    rig.run(10)
    rig.num_threads, rig.attention_s = 2, 2.0  # Ten times slower for each token, by the look of it.
    rig.run(60)
    assert controller.cpu_scale == 1.0  # More threads are never slower.
    rig.num_threads, rig.attention_s = 4, 0.01
    rig.run(60)
    assert controller.cpu_scale == 0.25  # Nor faster than their number says.


def test_without_measured_tables_there_is_nothing_to_scale() -> None:
    rig = machine(attention_s=0.3)
    rig.run(60)
    assert rig.controller.cpu_scale == 1.0
