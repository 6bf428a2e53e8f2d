"""What both processes of the data plane did when, in one iteration, as values. Meanings are those of executor.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from svc_common.plan import Mode


class TraceKind(IntEnum):
    """What a process spends time on; the numbers are those of the proto."""

    BOOKKEEPING = 1
    SWAP = 2
    PRE_ATTENTION = 3
    SUBMIT = 4
    ATTEND_PREFILLS = 5
    ATTEND_DECODES = 6
    WAIT = 7
    POST_ATTENTION = 8
    REPORT = 9
    HEAD = 10
    CPU_WAIT = 11
    CPU_ATTEND = 12
    WEIGHT_WAIT = 13
    WEIGHT_COPY = 14
    CPU_LAYER = 15
    RUN_PROMPTS = 16
    REPLAY = 17

    @property
    def is_bubble(self) -> bool:
        """Whether the process only waits, for the other one or for the link."""
        return self in _BUBBLES


COHORT = 2
"""Stands for a decoupled cohort where sub-batches are named by their place in the plan, 0 or 1."""


def batch_name(index: int) -> str:
    """Of a sub-batch or a cohort, for people."""
    return "cohort" if index == COHORT else f"sub-batch {index}"


_BUBBLES = frozenset({TraceKind.WAIT, TraceKind.REPORT, TraceKind.CPU_WAIT, TraceKind.WEIGHT_WAIT})


@dataclass(frozen=True, slots=True)
class TraceEvent:
    kind: TraceKind
    layer: int
    """-1 where in none."""
    sub_batch: int
    """-1 for the whole iteration."""
    start_ns: int
    """CLOCK_MONOTONIC."""
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """Events of one process as columns of one length: what travels, for there are hundreds an iteration."""

    kinds: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    sub_batches: tuple[int, ...] = ()
    offsets_ns: tuple[int, ...] = ()
    """After the iteration's start."""
    durations_ns: tuple[int, ...] = ()
    pool: int = 0
    """The host pool whose CPU attention service this is."""

    def __len__(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True, slots=True)
class TracedSubBatch:
    index: int
    """COHORT for a cohort."""
    prefill_tokens: int
    gpu_decodes: int
    cpu_decodes: int
    cpu_context_tokens: int


@dataclass(frozen=True, slots=True)
class IterationTrace:
    epoch: int
    iteration: int
    mode: Mode
    start_ns: int
    """CLOCK_MONOTONIC."""
    duration_ns: int
    sub_batches: tuple[TracedSubBatch, ...] = ()
    """A cohort last."""
    gpu: TraceEvents = TraceEvents()
    """One after another without a gap."""
    cpu: tuple[TraceEvents, ...] = ()
    """Of each CPU attention service that had something to do, by pool; one after another in each."""
    link: TraceEvents = TraceEvents()
    """Weights on their way to the device, one layer after another."""
    predicted_ns: int = 0
    """What the planner predicted duration_ns to be; 0 where it predicted nothing."""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    def events(self, *processes: TraceEvents) -> Iterator[TraceEvent]:
        """Columns as events. Raises ValueError where they don't match or name no known kind."""
        for of in processes:
            columns = (of.kinds, of.layers, of.sub_batches, of.offsets_ns, of.durations_ns)
            for kind, layer, sub_batch, offset_ns, duration_ns in zip(*columns, strict=True):
                start_ns = self.start_ns + offset_ns
                yield TraceEvent(TraceKind(kind), layer, sub_batch, start_ns, start_ns + duration_ns)
