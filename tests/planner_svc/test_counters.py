"""Sums over results, and the delay that a refused caller is given."""

import pytest

from planner_svc.counters import ClassCounters, ClassLoad, ClassTallies, Counters, FinishRate
from svc_common.plan import IterationResult, Timings


def test_results_are_summed() -> None:
    counters = Counters(planning_ns=5)
    result = IterationResult(
        epoch=1,
        iteration=1,
        timings=Timings(total_ns=10, cpu_wait_ns=2, cpu_attention_ns=3),
        swapped_out_bytes=100,
        swapped_in_bytes=200,
        gpu_attended_tokens=7,
        cpu_attended_tokens=8,
    )
    counters.add(result)
    counters.add(result)
    assert counters == Counters(
        gpu_attended_tokens=14,
        cpu_attended_tokens=16,
        swapped_out_bytes=200,
        swapped_in_bytes=400,
        executor_busy_ns=20,
        cpu_wait_ns=4,
        cpu_attention_ns=6,
        planning_ns=5,
    )


@pytest.mark.parametrize(
    ("ends_s", "now_s", "expected_s"),
    [
        ([], 50.0, 1.0),
        ([10.0, 12.0, 14.0, 16.0], 18.0, 2.0),
        ([10.0, 10.0, 10.0], 10.0, 0.1),
        ([10.0], 1000.0, 30.0),
    ],
)
def test_retry_delay_is_the_time_per_end_of_late(ends_s: list[float], now_s: float, expected_s: float) -> None:
    rate = FinishRate()
    for end_s in ends_s:
        rate.add(end_s)
    assert rate.retry_after_s(now_s) == expected_s


def test_only_the_latest_ends_count() -> None:
    rate = FinishRate()
    for _ in range(100):
        rate.add(0.0)
    for second in range(32):
        rate.add(100.0 + second)
    assert rate.retry_after_s(132.0) == 1.0


def test_requests_are_counted_by_class() -> None:
    tallies = ClassTallies(["chat", "batch"])
    for _ in range(4):
        tallies.accept("chat")
    tallies.accept("batch")
    tallies.refuse("chat")
    for targets_met in (True, False, True, None):
        tallies.judge("chat", targets_met)
    tallies.end("chat")
    assert tallies.counters == {"batch": ClassCounters(), "chat": ClassCounters(in_time=2, late=1, refused=1)}
    waiting = {"batch": 1, "chat": 2}
    assert tallies.loads(waiting.__getitem__) == (ClassLoad("batch", 1, 0), ClassLoad("chat", 2, 1))
