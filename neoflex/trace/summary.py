"""Sums traces up: how busy each side was, what its bubbles and hops cost."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from neoflex.trace.services import service_names
from svc_common.plan import Mode
from svc_common.trace import IterationTrace, TraceEvent, TraceKind


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Where one iteration's time went."""

    total_ns: int
    gpu_busy_ns: int
    """Of the executor's thread: all but its waits."""
    cpu_busy_ns: int
    """At least one CPU attention service computed."""
    both_busy_ns: int
    """While the executor was busy, too."""
    gpu_bubble_ns: int
    """The executor waited for the CPU, or for weights."""
    services: dict[int, "ServiceTimes"]
    """Of each CPU attention service that had something to do, by host pool."""
    hops_ns: tuple[int, ...]
    """For each layer and sub-batch, or cohort, that went to the CPU, see `hop_ns`; none of a replayed graph's."""


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    busy_ns: int
    bubble_ns: int
    """It waited for a submit, from its first wait to its last attention."""


def times_of(trace: IterationTrace) -> IterationTimes:
    gpu = list(trace.events(trace.gpu))
    by_pool = {events.pool: list(trace.events(events)) for events in trace.cpu}
    gpu_bubble_ns = _bubble_ns(gpu)
    busy, cpu_busy = _busy(gpu), _busy(chain(*by_pool.values()))
    return IterationTimes(
        total_ns=trace.duration_ns,
        gpu_busy_ns=trace.duration_ns - gpu_bubble_ns,
        cpu_busy_ns=sum(end_ns - start_ns for start_ns, end_ns in cpu_busy),
        both_busy_ns=_common_ns(busy, cpu_busy),
        gpu_bubble_ns=gpu_bubble_ns,
        services={
            pool: ServiceTimes(sum(end_ns - start_ns for start_ns, end_ns in _busy(events)), _bubble_ns(events))
            for pool, events in by_pool.items()
        },
        hops_ns=_hops_ns(gpu, by_pool.values()),
    )


def _bubble_ns(events: Iterable[TraceEvent]) -> int:
    return sum(event.duration_ns for event in events if event.kind.is_bubble)


def _busy(events: Iterable[TraceEvent]) -> list[tuple[int, int]]:
    """Start and end of the times in which at least one lasts that is no bubble; in order and free of overlaps."""
    merged: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted((event.start_ns, event.end_ns) for event in events if not event.kind.is_bubble):
        if merged and start_ns <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_ns)
        else:
            merged.append((start_ns, end_ns))
    return merged


def _common_ns(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> int:
    """Of two results of `_busy`."""
    total_ns = i = j = 0
    while i < len(left) and j < len(right):
        total_ns += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total_ns


def _hops_ns(gpu: Iterable[TraceEvent], services: Iterable[Iterable[TraceEvent]]) -> tuple[int, ...]:
    """Of several services that attend for one sub-batch, by the one that comes to its end last: all wait for that.

    A replayed graph is one step of the executor's, whose layers nobody has seen: no hop.
    """
    of_gpu = {(event.kind, event.layer, event.sub_batch): event for event in gpu}
    last: dict[tuple[int, int], tuple[TraceEvent, TraceEvent]] = {}
    for events in services:
        waits = {}
        for event in events:
            place = event.layer, event.sub_batch
            if event.kind is TraceKind.CPU_WAIT:
                waits[place] = event
            elif event.kind is TraceKind.CPU_ATTEND and (place not in last or last[place][1].end_ns < event.end_ns):
                last[place] = waits[place], event
    return tuple(
        hop_ns(of_gpu[TraceKind.SUBMIT, *place], *attended, of_gpu[TraceKind.WAIT, *place])
        for place, attended in last.items()
        if (TraceKind.SUBMIT, *place) in of_gpu
    )


def hop_ns(submit: TraceEvent, cpu_wait: TraceEvent, attend: TraceEvent, wait: TraceEvent) -> int:
    """What a trip to the CPU and back costs beside the attention itself: copying q, k, v and out, and noticing.

    A side notices late by the time from when there is something to notice and it looks, to when it goes on.
    """
    down_ns = attend.start_ns - max(submit.end_ns, cpu_wait.start_ns)
    up_ns = wait.end_ns - max(attend.end_ns, wait.start_ns)
    return submit.duration_ns + max(0, down_ns) + max(0, up_ns)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all iterations recorded. Shares are of `wall_ns`."""

    num_iterations: int
    num_by_mode: dict[Mode, int]
    """Of modes that ran."""
    num_missed: int
    """Iterations between the first and the last that did not arrive."""
    wall_ns: int
    """From the first iteration's start to the last one's end."""
    idle_share: float
    """The executor had no plan."""
    gpu_busy_share: float
    gpu_bubble_share: float
    cpu_busy_share: float
    """At least one CPU attention service computed."""
    services: dict[str, tuple[float, float]]
    """Shares of each CPU attention service by its name: busy, and waiting for a submit."""
    both_busy_share: float
    hop_p50_ns: float
    hop_share: float
    """Hops of all layers, as if each held the iteration up."""
    median: IterationTimes
    """The iteration of median duration."""
    slowest: IterationTrace
    num_predicted: int
    """Iterations whose duration was predicted."""
    error_p50: float
    """Of |predicted - measured| / measured over those iterations."""
    error_p95: float
    predicted_share: float
    """All predicted durations over all measured ones; above 1 the planner is too cautious."""

    def describe_modes(self) -> str:
        """The most frequent first."""
        frequent = sorted(self.num_by_mode.items(), key=lambda item: -item[1])
        return ", ".join(f"{num} {mode.value}" for mode, num in frequent)

    @property
    def neither_busy_share(self) -> float:
        """Hops that hold both sides up, and what the executor idles."""
        return 1 - self.gpu_busy_share - self.cpu_busy_share + self.both_busy_share


def summarize(traces: Sequence[IterationTrace]) -> Summary:
    """Of at least one iteration, in the order they ran."""
    times = [times_of(trace) for trace in traces]
    wall_ns = traces[-1].end_ns - traces[0].start_ns
    predicted = [trace for trace in traces if trace.predicted_ns]
    errors = sorted(abs(trace.predicted_ns / trace.duration_ns - 1) for trace in predicted)
    hops = [hop for each in times for hop in each.hops_ns]
    return Summary(
        num_iterations=len(traces),
        num_by_mode=dict(Counter(trace.mode for trace in traces)),
        num_missed=sum(
            after.iteration - before.iteration - 1 for before, after in pairwise(traces) if after.epoch == before.epoch
        ),
        wall_ns=wall_ns,
        idle_share=1 - sum(each.total_ns for each in times) / wall_ns,
        gpu_busy_share=sum(each.gpu_busy_ns for each in times) / wall_ns,
        gpu_bubble_share=sum(each.gpu_bubble_ns for each in times) / wall_ns,
        cpu_busy_share=sum(each.cpu_busy_ns for each in times) / wall_ns,
        services={name: _shares(times, pool, wall_ns) for pool, name in service_names(traces).items()},
        both_busy_share=sum(each.both_busy_ns for each in times) / wall_ns,
        hop_p50_ns=statistics.median(hops) if hops else 0.0,
        hop_share=sum(hops) / wall_ns,
        median=sorted(times, key=lambda each: each.total_ns)[len(times) // 2],
        slowest=max(traces, key=lambda trace: trace.duration_ns),
        num_predicted=len(predicted),
        error_p50=statistics.median(errors) if errors else 0.0,
        error_p95=errors[int(0.95 * len(errors))] if errors else 0.0,
        predicted_share=sum(trace.predicted_ns for trace in predicted)
        / max(1, sum(trace.duration_ns for trace in predicted)),
    )


def _shares(times: Iterable[IterationTimes], pool: int, wall_ns: int) -> tuple[float, float]:
    found = [each.services[pool] for each in times if pool in each.services]
    return sum(each.busy_ns for each in found) / wall_ns, sum(each.bubble_ns for each in found) / wall_ns
