"""Sums traces up: how busy each side was, what its bubbles and hops cost."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from svc_common.plan import Mode
from svc_common.trace import IterationTrace, TraceEvent, TraceKind


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Where one iteration's time went."""

    total_ns: int
    gpu_busy_ns: int
    """Of the executor's thread: all but its waits."""
    cpu_busy_ns: int
    """The CPU attention service attended."""
    both_busy_ns: int
    gpu_bubble_ns: int
    """The executor waited for the CPU, or for weights."""
    cpu_bubble_ns: int
    """The CPU attention service waited for a submit, from its first wait to its last attention."""
    hops_ns: tuple[int, ...]
    """For each layer and sub-batch, or cohort, that went to the CPU, see `hop_ns`; none of a replayed graph's."""

    @property
    def longer_side_ns(self) -> int:
        return max(self.gpu_busy_ns, self.cpu_busy_ns)


def times_of(trace: IterationTrace) -> IterationTimes:
    gpu, cpu = list(trace.events(trace.gpu)), list(trace.events(trace.cpu))
    gpu_bubble_ns = sum(event.duration_ns for event in gpu if event.kind.is_bubble)
    return IterationTimes(
        total_ns=trace.duration_ns,
        gpu_busy_ns=trace.duration_ns - gpu_bubble_ns,
        cpu_busy_ns=sum(event.duration_ns for event in cpu if not event.kind.is_bubble),
        both_busy_ns=_both_busy_ns(gpu, cpu),
        gpu_bubble_ns=gpu_bubble_ns,
        cpu_bubble_ns=sum(event.duration_ns for event in cpu if event.kind.is_bubble),
        hops_ns=_hops_ns(gpu, cpu),
    )


def _both_busy_ns(gpu: Sequence[TraceEvent], cpu: Sequence[TraceEvent]) -> int:
    """Both lists are in order of time and free of overlaps."""
    left, right = ([event for event in side if not event.kind.is_bubble] for side in (gpu, cpu))
    total_ns = i = j = 0
    while i < len(left) and j < len(right):
        total_ns += max(0, min(left[i].end_ns, right[j].end_ns) - max(left[i].start_ns, right[j].start_ns))
        if left[i].end_ns < right[j].end_ns:
            i += 1
        else:
            j += 1
    return total_ns


def _hops_ns(gpu: Iterable[TraceEvent], cpu: Iterable[TraceEvent]) -> tuple[int, ...]:
    by_place = {(event.kind, event.layer, event.sub_batch): event for event in (*gpu, *cpu)}
    hops = []
    for kind, layer, sub_batch in by_place:
        # A replayed graph is one step of the executor's, whose layers nobody has seen.
        if kind is TraceKind.CPU_ATTEND and (TraceKind.SUBMIT, layer, sub_batch) in by_place:
            kinds = (TraceKind.SUBMIT, TraceKind.CPU_WAIT, TraceKind.CPU_ATTEND, TraceKind.WAIT)
            hops.append(hop_ns(*(by_place[each, layer, sub_batch] for each in kinds)))
    return tuple(hops)


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
    cpu_bubble_share: float
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
        cpu_bubble_share=sum(each.cpu_bubble_ns for each in times) / wall_ns,
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
