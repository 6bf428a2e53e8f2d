"""The simulator's baselines beside figures published with the shared simulation spec, where it is at hand.

`make bench-baselines` checks all of them.
"""

from pathlib import Path

import pytest

from planner_svc.simulator.runs import run
from planner_svc.simulator.spec import read_profile
from svc_common.workloads.workload import read_workload

_PLACES = [folder / "shared" / "simulation" / "spec.json" for folder in Path(__file__).resolve().parents]
SHARED_SPEC = next((place for place in _PLACES if place.exists()), None)


@pytest.mark.skipif(SHARED_SPEC is None, reason="no shared/simulation/spec.json above the tests: NOT COMPARED")
@pytest.mark.parametrize(
    ("policy", "profile", "workload", "limit", "published"),
    [
        ("gpu-only-knee", "a10g-16x", "syn-1000-200-2000", 600, 2.12),
        ("neo", "a10g-16x", "syn-1000-200-2000", 600, 2.04),
        ("neo", "a10g-4x", "syn-1000-200-2000", 600, 1.68),
        ("gpu-only-knee", "a10g-8x", "conv", None, 1.67),
        ("neo", "a10g-8x", "conv", None, 1.54),
        ("neo", "h100x2-70b", "conv", None, 2.18),
    ],
)
def test_throughput_of_bursts(policy, profile, workload, limit, published):
    arrivals = read_workload(SHARED_SPEC.parent / "workloads" / f"{workload}.json", limit)
    metrics = run(policy, read_profile(SHARED_SPEC, profile), arrivals, rate=0)
    assert metrics.thr_makespan == pytest.approx(published, rel=0.05)


@pytest.mark.skipif(SHARED_SPEC is None, reason="no shared/simulation/spec.json above the tests: NOT COMPARED")
@pytest.mark.parametrize(("rate", "bound_s"), [(1.62, 0.2), (3.8, 1.0)])
def test_latency_of_neo(rate, bound_s):
    """Published are the rates at which the mean latency a token reaches the bound: there it changes quickly."""
    arrivals = read_workload(SHARED_SPEC.parent / "workloads" / "osc.json")
    profile = read_profile(SHARED_SPEC, "t4")
    below, above = (run("neo", profile, arrivals, factor * rate).pertok_mean for factor in (0.95, 1.05))
    assert below < bound_s < above
