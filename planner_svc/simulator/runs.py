"""One run of a policy on a profile, and the search for the highest rate that it sustains."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner_svc.classes import ServiceClasses
from planner_svc.estimator import Factors, Timeline
from planner_svc.scheduler import Scheduler
from planner_svc.simulator.baselines import GpuOnly, Neo
from planner_svc.simulator.classes import check_names, one_class, without_targets
from planner_svc.simulator.elastic import ElasticCores
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.metrics import Metrics, measure
from planner_svc.simulator.policy import Policy
from planner_svc.simulator.simulation import Observer, Progress, Simulation, StalledError, ignore
from planner_svc.simulator.spec import Profile
from svc_common.plan import IterationPlan
from svc_common.workloads import InputError
from svc_common.workloads.workload import Arrival, at_rate

POLICIES = ("neoflex", "neo", "gpu-only", "gpu-only-knee", "gpu-only-slo")
_CHUNK_TOKENS = 512
_UNBOUNDED = 2**31
_LOWEST_RATE, _HIGHEST_RATE = 2.0**-10, 2.0**10
TOLERANCE = 0.01
"""Of the rate found."""


def make_policy(name: str, profile: Profile) -> Policy:
    """`gpu-only` and `gpu-only-knee` schedule as vLLM; `gpu-only-slo` is the serving scheduler without a host."""
    estimator = profile.estimator
    alone = profile.capacity(profile.gpu_blocks, (0,))
    both = profile.capacity(profile.offload_gpu_blocks, profile.host_pools)
    if name == "neoflex":
        return Scheduler(both, estimator, "auto", _UNBOUNDED)
    if name == "neo":
        return Neo(both, estimator, profile.believed_launch_s)
    if name == "gpu-only-slo":
        return Scheduler(alone, estimator, "gpu_only", _UNBOUNDED)
    if name == "gpu-only-knee":
        return GpuOnly(alone, max(64, round(estimator.linear_floor_s / estimator.linear_token_s / 64) * 64))
    if name == "gpu-only":
        return GpuOnly(alone, _CHUNK_TOKENS)
    raise ValueError(f"unknown policy {name!r}")


def run(
    name: str,
    profile: Profile,
    arrivals: Sequence[Arrival],
    rate: float,
    progress: Progress = ignore,
    observer: Observer = ignore,
    may_stall: bool = False,
    classes: ServiceClasses | None = None,
    threads: tuple[int, int] | None = None,
) -> Metrics:
    """`rate` in requests per second; 0: all at once, and nobody asks for a time. Raises InputError.

    `classes`: of the requests, each judged by its own; None: all are of one, with the profile's targets. `threads`:
    fewest and most that attend on the CPU, which then follow the load; for the policy `neoflex` only.

    Raises StalledError where requests are left that are never planned; with `may_stall` they count as unfinished.
    """
    if threads and profile.num_pools > 1:
        raise InputError(f"--elastic: profile {profile.name} must have 1 host pool, has {profile.num_pools}")
    if name == "neo":  # It knows one, of the whole CPU.
        profile = replace(profile, num_pools=1)
    _check_size(name, profile, arrivals)
    serving = classes or one_class(profile.targets)
    check_names(arrivals, serving)
    estimator, factors = profile.estimator, Factors()
    executor = SimulatedExecutor(estimator.calibrated(factors), estimator.kv_bytes_per_token, profile.host_pools)
    cores = ElasticCores(*threads, executor, factors) if threads else None

    def observe(start_s: float, plan: IterationPlan, timeline: Timeline, policy: Policy) -> None:
        observer(start_s, plan, timeline, policy)
        if cores:
            cores.observe(start_s, plan, timeline, policy)

    simulation = Simulation(make_policy(name, profile), executor, progress, observe)
    try:
        requests = simulation.run(at_rate(arrivals, rate), serving if rate else without_targets(serving))
    except StalledError as stalled:
        if not may_stall:
            raise
        requests = stalled.requests
    metrics = measure(requests, None if classes else profile.targets, executor.worked)
    if cores is None:
        return metrics
    until_s = max((item.last_s for item in requests if item.finished), default=0.0)
    mean = cores.mean(until_s) if until_s else 0.0
    return replace(metrics, threads=tuple(cores.changes), threads_mean=mean)


def find_capacity(is_met: Callable[[float], bool], first_rate: float, tolerance: float = TOLERANCE) -> float:
    """The highest rate at which `is_met`, within a share `tolerance` of it; 0 where there is none.

    Searches from `first_rate`, which is above 0, by doubling or halving, then by bisection: as if a load that is met
    at one rate were met at all lower ones.
    """
    low, high = 0.0, first_rate
    while is_met(high):
        low, high = high, 2 * high
        if high > _HIGHEST_RATE:
            return low
    while low == 0.0:
        if high < _LOWEST_RATE:
            return 0.0
        half = high / 2
        if is_met(half):
            low = half
        else:
            high = half
    while high - low > tolerance * low:
        middle = (low + high) / 2
        if is_met(middle):
            low = middle
        else:
            high = middle
    return low


def largest_request(name: str, profile: Profile) -> int:
    """Tokens of prompt and output of the largest request that a policy can serve: it must fit into one tier."""
    blocks = max(profile.offload_gpu_blocks, *profile.host_pools) if name == "neoflex" else profile.gpu_blocks
    return min(profile.context_tokens, blocks * profile.block_tokens)


def _check_size(name: str, profile: Profile, arrivals: Sequence[Arrival]) -> None:
    limit = largest_request(name, profile)
    for number, item in enumerate(arrivals):
        num_tokens = item.prompt_tokens + item.output_tokens
        if num_tokens > limit:
            raise InputError(
                f"--workload: request {number}: prompt and output are {num_tokens} tokens; "
                f"with --policy {name} profile {profile.name} holds at most {limit}"
            )
