"""What the planner is judged by: rates that keep targets, throughput of bursts, and what a plan costs.

Workloads and machines come from a simulation spec (`--spec`, by default shared/simulation above the repository). Rates
are simulated, so they are the same on every machine; only the cost of a plan is measured here. `--full` takes an hour
or more: it adds machines that are not what they are believed to be, generated workloads (generated.py), and every
profile and workload beside every baseline (sweep.py).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import generated
import sweep
from results import Row, arguments, publish, shared_spec

from planner_svc.estimator import HardwareSpec, ModelFigures, RooflineEstimator
from planner_svc.scheduler import Capacity, Scheduler, SequenceRequest, Targets
from planner_svc.simulator.classes import one_class
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.metrics import measure
from planner_svc.simulator.runs import POLICIES, make_policy, run
from planner_svc.simulator.simulation import Simulation
from planner_svc.simulator.spec import Profile, read_profile
from svc_common.plan import Sampling
from svc_common.workloads.workload import Arrival, at_rate, read_workload

IN_TIME = 0.9
"""Share of the requests that must meet both targets."""
AT_90 = (
    # profile, workload, rate that must be reached, best baseline's rate as published with the spec
    ("t4", "osc-1000", 3.6, 1.18),
    ("a10g-4x", "conv", 1.5, 1.40),
    ("a10g-8x", "conv", 1.72, 1.40),
    ("a10g-16x", "conv", 1.8, 1.40),
)
BURSTS = (
    ("a10g-8x", "conv", 2.0),
    ("a10g-16x", "syn-1000-200-2000", 2.6),
    ("h100x2-70b", "conv", 2.61),
)
NO_LOSS = (
    ("a10g-4x", "syn-1000-200-2000", 0.0),
    ("h100x2-70b", "conv", 0.0),
    ("h100-8b", "conv", 0.0),
    ("h100x2-70b", "conv", 2.27),
    ("h100-8b", "conv", 10.0),
    ("l4", "conv", 0.7),
    ("rtx4090", "conv", 1.8),
)
"""Profile, workload, rate: where no baseline may be better by more than 2 %. Rate 0: a burst, by throughput."""
_NUM_POOLS = 4
"""Of the host, where a plan's cost is measured with several."""


WRONG = (
    # profile, workload, requests, rate near what it sustains
    ("t4", "osc-1000", 500, 3.6),
    ("a10g-8x", "conv", 400, 1.7),
)
WRONG_BY = (0.7, 1.3)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--spec", type=Path, default=shared_spec(), help="simulation spec; its workloads lie beside it")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only-cost", action="store_true", help="measure the cost of a plan alone")
    only.add_argument("--only-sweep", action="store_true", help="simulate every profile and workload, and nothing else")
    only.add_argument("--full", action="store_true", help="all there is")
    add = parser.add_argument
    add("--requests", type=int, default=sweep.NUM_REQUESTS, help="of each workload in the sweep, the first so many")
    add("--profiles", type=lambda text: text.split(","), default=sweep.PROFILES, help="of the sweep")
    add("--jobs", type=int, default=1, help="processes that simulate the sweep")
    add("--cells", type=Path, help="file that keeps the sweep's cells, to go on after an interruption")
    options = parser.parse_args()
    if options.spec is None:
        print("no simulation spec: rates are not simulated; give one with --spec", file=sys.stderr)
    if not options.only_sweep:
        _judge(options)
    if options.spec is not None and (options.full or options.only_sweep):
        _sweep(options)


def _judge(options: argparse.Namespace) -> None:
    rows: list[Row] = []
    if options.spec is not None and not options.only_cost:
        rows += _reached(options.spec)
    if options.full:
        if options.spec is not None:
            rows += [_no_loss(options.spec, *item) for item in NO_LOSS]
            rows += _wrong(options.spec)
        rows += generated.rows()
    rows += _costs()
    about = "Simulated on the machines and workloads of the simulation spec; the cost of a plan is measured."
    publish("planner", "Planner", f"make bench-planner{_suffix(options)}", about, rows, options.publish)


def _sweep(options: argparse.Namespace) -> None:
    found = sweep.cells(options.spec, options.profiles, options.requests, options.jobs, options.cells)
    about = (
        "Every profile and workload of the simulation spec beside NEO, the GPU alone (512 and knee), and the GPU alone "
        f"with our SLO rules; of each workload the first {options.requests} requests. With targets: rates from "
        f"{sweep.SHARES[0]:.0%} to {sweep.SHARES[-1]:.0%} of what NeoFlex and the best baseline serve of a burst, as "
        "far as the best policy serves half of the requests in time. A burst as short as this weighs its end, when "
        "sequences on a slow CPU finish last. All cells: [performance/sweep.json](performance/sweep.json)."
    )
    command = f"make bench-planner{_suffix(options)}"
    cells = [asdict(cell) for cell in found]
    rows = list(sweep.rows(found))
    publish("sweep", "Every profile and workload", command, about, rows, options.publish, cells=cells)


def _suffix(options: argparse.Namespace) -> str:
    """Of the make target that runs this."""
    return "-full" if options.full or options.only_sweep else ""


def _reached(spec: Path) -> Iterator[Row]:
    """Rates and throughputs that must be reached."""
    for profile, workload, rate, baseline in AT_90:
        metrics = run("neoflex", *_input(spec, profile, workload), rate)
        yield Row(
            f"{profile}: {workload} at {rate:g} req/s",
            metrics.slo / IN_TIME,
            f"share in time / {IN_TIME:g}",
            1.0,
            detail=f"{metrics.slo:.3f} in time, longest gap {metrics.gap_max:.1f} s; best baseline {baseline:g} req/s",
        )
    metrics = run("neoflex", *_input(spec, "t4", "osc-1000"), 3.2)
    latency = f"{metrics.pertok_mean:.3f} s a token"
    yield Row("t4: osc-1000 at 3.2 req/s", metrics.pertok_mean / 0.2, "latency a token / 0.2 s", 1.0, False, latency)
    for profile, workload, target in BURSTS:
        metrics = run("neoflex", *_input(spec, profile, workload), 0.0)
        detail = f"{metrics.thr_makespan:.2f} req/s"
        yield Row(
            f"{profile}: burst of {workload}", metrics.thr_makespan / target, f"req/s / {target:g}", 1.0, detail=detail
        )


def _wrong(spec: Path) -> Iterator[Row]:
    """Each figure of the machine is not what the scheduler is told: the one that costs most requests their targets."""
    for name, workload, num_requests, rate in WRONG:
        profile, arrivals = _input(spec, name, workload)
        worst = (float("inf"), "")
        for figure in HardwareSpec.__dataclass_fields__:
            for ratio in WRONG_BY:
                hardware = replace(profile.hardware, **{figure: ratio * getattr(profile.hardware, figure)})
                load, truth = at_rate(arrivals[:num_requests], rate), replace(profile, hardware=hardware)
                learning, knowing = (_share_in_time(truth, believed, load) for believed in (profile, truth))
                what = f"{figure} x {ratio:g}: {learning:.3f} in time, {knowing:.3f} if told the truth"
                worst = min(worst, (learning / knowing, what))
        what = f"{name}: {workload} at {rate:g} req/s, a figure off by 30 %"
        yield Row(what, worst[0], "share in time / if told the truth, worst figure", 0.9, detail=worst[1])


def _share_in_time(truth: Profile, believed: Profile, load: list[Arrival]) -> float:
    """On a machine that is one thing and believed to be another. Raises StalledError where progress stops."""
    executor = SimulatedExecutor(truth.estimator, truth.estimator.kv_bytes_per_token)
    requests = Simulation(make_policy("neoflex", believed), executor).run(load, one_class(truth.targets))
    return measure(requests, truth.targets, executor.worked).slo


def _no_loss(spec: Path, profile: str, workload: str, rate: float) -> Row:
    """Against the best of all baselines."""
    results = {name: run(name, *_input(spec, profile, workload), rate) for name in POLICIES}
    values = {name: result.slo if rate else result.thr_makespan for name, result in results.items()}
    ours = values.pop("neoflex")
    best = max(values, key=lambda name: values[name])
    what = f"{workload} at {rate:g} req/s" if rate else f"burst of {workload}"
    unit = "in time" if rate else "req/s"
    detail = f"{ours:.3f} {unit}, {values[best]:.3f} {best}"
    return Row(f"{profile}: {what}", ours / values[best], "neoflex / best baseline", 0.98, detail=detail)


def _input(spec: Path, profile: str, workload: str) -> tuple[Profile, list[Arrival]]:
    return read_profile(spec, profile), read_workload(spec.parent / "workloads" / f"{workload}.json")


# --- what a plan costs


def _costs() -> list[Row]:
    usual = _plan_times(num_running=1024, num_waiting=1024)
    half = _plan_times(num_running=512, num_waiting=1024)
    crowded = _plan_times(num_running=1024, num_waiting=10_000)
    p99, p50 = _quantile(usual, 0.99), statistics.median(usual)
    pools = _plan_times(num_running=1024, num_waiting=1024, num_pools=_NUM_POOLS)
    pools_p99, pools_p50 = _quantile(pools, 0.99), statistics.median(pools)
    return [
        Row(
            "a plan, 1,024 running, 1,024 waiting",
            p99 / 2e-3,
            "p99 / 2 ms",
            1.0,
            False,
            f"p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms",
        ),
        Row(
            f"the same with {_NUM_POOLS} host pools",
            pools_p99 / 2e-3,
            "p99 / 2 ms",
            1.0,
            False,
            f"p50 {pools_p50 * 1e3:.2f} ms, p99 {pools_p99 * 1e3:.2f} ms",
        ),
        Row("twice as many running", p50 / statistics.median(half), "1,024 / 512, p50", 2.2, False),
        Row("10,000 waiting", statistics.median(crowded) / p50, "10,000 / 1,024, p50", 1.1, False),
    ]


HARDWARE = HardwareSpec(
    gpu_flops_per_s=1e15,
    linear_efficiency=0.5,
    attention_efficiency=0.3,
    gpu_bytes_per_s=6e11,
    gpu_bandwidth_efficiency=0.8,
    cpu_bytes_per_s=2e12,
    cpu_bandwidth_efficiency=0.8,
    link_bytes_per_s=2e10,
    launch_s=5e-5,
    cpu_sequence_s=1e-8,
    cpu_hop_s=5e-5,
    iteration_s=1e-3,
)
"""A CPU that keeps up with a thousand sequences."""
MODEL = ModelFigures(32, 4096, 14336, 32, 8, 128, 128256)


class _Loaded:
    """A scheduler with so many sequences decoding, a quarter of them on the GPU, and its executor."""

    def __init__(self, num_running: int, num_waiting: int, num_pools: int) -> None:
        capacity = Capacity(
            gpu_blocks=num_running // 4 * 12,
            host_pools=(num_running * 200 // num_pools,) * num_pools,
            block_tokens=16,
            max_sequences=num_running,
            max_batch_tokens=2 * num_running,
            max_sequence_tokens=4096,
            block_bytes=16 * 4096 * 32,
        )
        self._estimator = RooflineEstimator(HARDWARE, MODEL)
        self.scheduler = Scheduler(capacity, self._estimator, "auto", 2 * (num_running + num_waiting))
        self._executor = SimulatedExecutor(self._estimator, self._estimator.kv_bytes_per_token, capacity.host_pools)
        self._now = 0.0
        self._add(num_running)
        while self.scheduler.num_waiting:
            self.step()
        self._add(num_waiting)
        for _ in range(10):
            self.step()

    def _add(self, num_requests: int) -> None:
        request = SequenceRequest((0,) * 100, 3000, Sampling(), frozenset(), Targets(60.0, 10.0))
        for _ in range(num_requests):
            self.scheduler.add(request, self._now)

    def step(self) -> float:
        """Seconds that the plan took to make."""
        start = time.perf_counter()
        plan = self.scheduler.plan(self._now)
        seconds = time.perf_counter() - start
        assert plan is not None
        iteration_s, result = self._executor.run(plan)
        self._now += iteration_s
        self.scheduler.apply(result, self._now)
        return seconds


def _plan_times(num_running: int, num_waiting: int, num_pools: int = 1, num_plans: int = 300) -> list[float]:
    loaded = _Loaded(num_running, num_waiting, num_pools)
    times = [loaded.step() for _ in range(num_plans)]
    assert loaded.scheduler.num_running == num_running
    counters = loaded.scheduler.counters
    assert counters.asymmetric_iterations + counters.same_layer_iterations >= num_plans
    return times


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


if __name__ == "__main__":
    main()
