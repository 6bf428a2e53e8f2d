"""Runs iterations of a policy through four lanes, GPU, CPU, link up and link down, as the executor orders its work.

    link up    | w4 | w5 | w6 |       h        w: a streamed layer's weights, h: hidden states of a group
    GPU                  | 4 | 5 | 6 | 7 8 9   4 to 6 streamed, 7 to 9 resident
    CPU        | 0 1 2 3 |                     of the next group, where there are two

- A streamed layer waits for its weights. They arrive in order, into two buffers used in turn, a ring that runs on from
  one iteration to the next: the transfer of one begins when the layer two before it has been computed.
- A group goes through the CPU's layers, then through the GPU's. The second group's CPU layers run beside the first
  group's GPU layers; each group streams the weights anew. An iteration ends when both groups have their tokens.
- A layer's K and V that the other side will need go over the link as soon as they exist.
- Decodes with KV on the host attend there, beside the GPU's own attention of the same layer.

Max-plus recurrences over lanes: every start is the latest of what it waits for, in the order of the program.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Lane(Enum):
    GPU = "GPU"
    CPU = "CPU"
    UP = "link up"
    DOWN = "link down"


class Buffers(Enum):
    """What the buffers hold before the first iteration."""

    EMPTY = "nothing, and nothing is under way"
    FIRST = "the layers that it needs first"
    RUNNING = "what an iteration like it would have left"


class Step(Enum):
    """What a segment of a lane is."""

    LAYER = "layer"
    ATTENTION = "attention of host decodes"
    HEAD = "head"
    WEIGHTS = "weights"
    HIDDEN = "hidden states"
    KV = "K and V"


@dataclass(frozen=True, slots=True)
class Segment:
    """One thing that a lane does, in seconds from the first iteration's start."""

    lane: Lane
    step: Step
    start_s: float
    end_s: float
    group: int
    layer: int
    """-1: none."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Seconds of one group's steps in one iteration, by layer."""

    layer_s: Sequence[float]
    """On the processor that computes the layer: linear operations, and of a GPU layer those before its attention."""
    attention_s: Sequence[float]
    """Where the layer runs."""
    host_attention_s: Sequence[float]
    """On the CPU, of decodes with KV on the host; 0 for CPU layers."""
    kv_up_s: Sequence[float]
    """Of a GPU layer's K and V that lie on the host and are attended on the GPU; 0 for CPU layers."""
    kv_down_s: Sequence[float]
    """Of those that the layer makes and that will lie on the host."""
    hidden_up_s: float
    hidden_down_s: float
    head_s: float


@dataclass(frozen=True, slots=True)
class IterationWork:
    """One iteration, the same each time."""

    num_layers: int
    cpu_layers: int
    first_held: int
    """The first layer whose weights stay on the GPU."""
    stream_s: Sequence[float]
    """Of each layer's weights over the link."""
    groups: tuple[GroupTimes, ...]
    hop_s: float
    overhead_s: float


class Lanes:
    """The time at which each lane is free; iterations go through one after another."""

    def __init__(
        self, work: IterationWork, records: list[Segment] | None = None, buffers: Buffers = Buffers.EMPTY
    ) -> None:
        self._work = work
        self._records = records
        self._free = dict.fromkeys(Lane, 0.0)
        streamed = range(work.cpu_layers, work.first_held)
        self._streamed = tuple(streamed)
        self._next = 0
        """Of the ring: place in `_streamed` of the next transfer."""
        self._arrivals: deque[float] = deque()
        self._end_s = 0.0
        for _ in range(2 if streamed else 0):
            if buffers is Buffers.EMPTY:
                self._fetch(0.0)
            else:
                self._arrivals.append(0.0)
                self._next = (self._next + 1) % len(streamed)

    def run(self) -> float:
        """One iteration; returns its end in seconds from the first one's start."""
        work, start_s = self._work, self._end_s
        ready = [self._run_cpu_layers(number, group, start_s) for number, group in enumerate(work.groups)]
        end_s = start_s
        for number, group in enumerate(work.groups):
            end_s = max(end_s, self._run_gpu_layers(number, group, ready[number]))
        self._end_s = max(end_s, self._free[Lane.DOWN]) + work.overhead_s
        return self._end_s

    def _occupy(self, lane: Lane, step: Step, ready_s: float, seconds: float, group: int, layer: int = -1) -> float:
        """The end of a step that begins when it is ready and the lane is free."""
        if seconds <= 0:
            return ready_s
        start_s = max(ready_s, self._free[lane])
        end_s = start_s + seconds
        self._free[lane] = end_s
        if self._records is not None:
            self._records.append(Segment(lane, step, start_s, end_s, group, layer))
        return end_s

    def _fetch(self, buffer_free_s: float) -> None:
        layer = self._streamed[self._next]
        self._next = (self._next + 1) % len(self._streamed)
        self._arrivals.append(self._occupy(Lane.UP, Step.WEIGHTS, buffer_free_s, self._work.stream_s[layer], -1, layer))

    def _run_cpu_layers(self, number: int, group: GroupTimes, start_s: float) -> float:
        """When the group may go on on the GPU."""
        work = self._work
        if not work.cpu_layers:
            return start_s
        at_s = self._occupy(Lane.DOWN, Step.HIDDEN, start_s, group.hidden_down_s, number) + work.hop_s
        for layer in range(work.cpu_layers):
            seconds = group.layer_s[layer] + group.attention_s[layer]
            at_s = self._occupy(Lane.CPU, Step.LAYER, at_s, seconds, number, layer)
        return self._occupy(Lane.UP, Step.HIDDEN, at_s, group.hidden_up_s, number) + work.hop_s

    def _run_gpu_layers(self, number: int, group: GroupTimes, at_s: float) -> float:
        """When the group has its tokens."""
        work = self._work
        for layer in range(work.cpu_layers, work.num_layers):
            is_streamed = layer < work.first_held
            if is_streamed:
                at_s = max(at_s, self._arrivals.popleft())
            at_s = self._occupy(Lane.UP, Step.KV, at_s, group.kv_up_s[layer], number, layer)
            linear_s, host_s = group.layer_s[layer], group.host_attention_s[layer]
            begin_s = max(at_s, self._free[Lane.GPU])
            at_s = self._occupy(Lane.GPU, Step.LAYER, at_s, linear_s + group.attention_s[layer], number, layer)
            if host_s:
                submitted_s = begin_s + linear_s + work.hop_s
                attended_s = self._occupy(Lane.CPU, Step.ATTENTION, submitted_s, host_s, number, layer)
                at_s = max(at_s, attended_s + work.hop_s)
            if is_streamed:
                self._fetch(at_s)
            self._occupy(Lane.DOWN, Step.KV, at_s, group.kv_down_s[layer], number, layer)
        return self._occupy(Lane.GPU, Step.HEAD, at_s, group.head_s, number)
