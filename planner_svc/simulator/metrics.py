"""What a simulated run is judged by; names and definitions as in the simulation spec."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner_svc.estimator import Timeline
from planner_svc.scheduler import DEFAULT_CLASS, ServiceClass, Targets


@dataclass(slots=True)
class Served:
    """One request's life, in seconds of simulated time."""

    arrival_s: float
    output_tokens: int
    num_tokens: int = 0
    first_s: float = math.inf
    last_s: float = math.inf
    """Of the latest token."""
    longest_gap_s: float = 0.0
    """Between two tokens."""
    service_class: ServiceClass = DEFAULT_CLASS
    is_refused: bool = False
    """When it arrived, because it would have been late."""

    def take_token(self, now: float) -> None:
        if self.num_tokens:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        else:
            self.first_s = now
        self.last_s = now
        self.num_tokens += 1

    @property
    def finished(self) -> bool:
        return self.num_tokens == self.output_tokens

    def meets(self, targets: Targets) -> bool:
        if not self.finished or self.first_s - self.arrival_s > targets.ttft_s:
            return False
        return self.last_s - self.first_s <= targets.tpot_s * (self.output_tokens - 1) + 1e-9


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """Of the requests of one service class."""

    name: str
    requests: int
    refused_late: int
    slo: float | None
    """Share that meets both targets of the class; None where it has none."""
    ttft_p50: float
    """As in Metrics."""
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one run. What is said of all requests leaves out those refused when they arrived, but for `slo`."""

    slo: float
    """Share that meets both targets, of all requests that have any; 1 of none."""
    thr_makespan: float
    """Requests a second over the whole run."""
    thr_mid: float
    """Requests a second between 30 % and 70 % of the completions: NEO's window."""
    goodput: float
    """Requests a second over the whole run, of those that meet both targets."""
    tokens_per_s: float
    """Output tokens a second over the whole run, of finished requests."""
    pertok_mean: float
    """Mean over the last three quarters of the requests of latency / output tokens, seconds."""
    gap_p50: float
    gap_p99: float
    gap_max: float
    """Over requests, of the longest time between two tokens, seconds."""
    ttft_p50: float
    """Over all requests, of the time from arrival to the first token, seconds."""
    ttft_p95: float
    ttft_p99: float
    tpot_p50: float
    """Over finished requests of several tokens, of the mean time from one to the next, seconds."""
    tpot_p95: float
    tpot_p99: float
    gpu_busy: float
    """Share of the time until the last completion in which this lane works; the rest are bubbles and idle time."""
    cpu_busy: float
    link_out_busy: float
    link_in_busy: float
    unfinished: int
    refused_late: int
    """When they arrived, because they would have been late."""
    classes: tuple[ClassMetrics, ...]
    """By name."""
    threads: tuple[tuple[float, int], ...] = ()
    """(seconds, threads of attention on the CPU from then on), where they follow the load."""
    threads_mean: float = 0.0
    """Over the time until the last completion."""


def measure(requests: Sequence[Served], targets: Targets | None, worked: Timeline) -> Metrics:
    """Of at least one request, in order of arrival. `worked`: what their iterations took.

    `targets`: what all are judged by; None: each by those of its class.
    """
    judged = [(item, targets or item.service_class.targets) for item in requests]
    num_judged = sum(wanted is not None for _, wanted in judged)
    num_in_time = sum(wanted is not None and item.meets(wanted) for item, wanted in judged)
    num_requests = len(requests)
    classes = _by_class(requests)
    requests = [item for item in requests if not item.is_refused]
    finished = [item for item in requests if item.finished]
    finishes = sorted(item.last_s for item in finished)
    low, high = int(len(finishes) * 0.3), int(len(finishes) * 0.7)
    makespan_s = finishes[-1] if finishes else math.inf
    window_s = finishes[high] - finishes[low] if high > low else 0.0
    late_part = requests[len(requests) // 4 :]
    pertok_s = [(item.last_s - item.arrival_s) / item.output_tokens for item in late_part]
    gaps = sorted(item.longest_gap_s for item in requests)
    ttfts, tpots = _times(requests)
    return Metrics(
        slo=num_in_time / num_judged if num_judged else 1.0,
        thr_makespan=len(finishes) / makespan_s,
        thr_mid=(high - low) / window_s if window_s else 0.0,
        goodput=num_in_time / makespan_s,
        tokens_per_s=sum(item.output_tokens for item in finished) / makespan_s,
        pertok_mean=sum(pertok_s) / len(pertok_s) if pertok_s else math.inf,
        gap_p50=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
        gap_max=gaps[-1] if gaps else 0.0,
        ttft_p50=quantile(ttfts, 0.5),
        ttft_p95=quantile(ttfts, 0.95),
        ttft_p99=quantile(ttfts, 0.99),
        tpot_p50=quantile(tpots, 0.5),
        tpot_p95=quantile(tpots, 0.95),
        tpot_p99=quantile(tpots, 0.99),
        gpu_busy=worked.gpu_s / makespan_s,
        cpu_busy=worked.cpu_s / makespan_s,
        link_out_busy=worked.link_out_s / makespan_s,
        link_in_busy=worked.link_in_s / makespan_s,
        unfinished=len(requests) - len(finished),
        refused_late=num_requests - len(requests),
        classes=classes,
    )


def _times(requests: Sequence[Served]) -> tuple[list[float], list[float]]:
    """TTFT of all, and TPOT of those finished of several tokens; rising."""
    several = [item for item in requests if item.finished and item.output_tokens > 1]
    return sorted(item.first_s - item.arrival_s for item in requests), sorted(
        (item.last_s - item.first_s) / (item.output_tokens - 1) for item in several
    )


def _by_class(requests: Sequence[Served]) -> tuple[ClassMetrics, ...]:
    groups: dict[str, list[Served]] = {}
    for item in requests:
        groups.setdefault(item.service_class.name, []).append(item)
    found = []
    for name, group in sorted(groups.items()):
        targets = group[0].service_class.targets
        accepted = [item for item in group if not item.is_refused]
        ttfts, tpots = _times(accepted)
        found.append(
            ClassMetrics(
                name=name,
                requests=len(group),
                refused_late=len(group) - len(accepted),
                slo=sum(item.meets(targets) for item in group) / len(group) if targets else None,
                ttft_p50=quantile(ttfts, 0.5),
                ttft_p95=quantile(ttfts, 0.95),
                tpot_p50=quantile(tpots, 0.5),
                tpot_p95=quantile(tpots, 0.95),
            )
        )
    return tuple(found)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
