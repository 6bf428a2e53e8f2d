"""What the engine counts: sums over results, requests at the door, and how fast requests end."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from svc_common.plan import IterationResult

_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


@dataclass(slots=True)
class Counters:
    """Since the planner started. Iterations and recomputed tokens are counted by the scheduler."""

    accepted_requests: int = 0
    finished_requests: int = 0
    refused_requests: int = 0
    executor_losses: int = 0
    gpu_attended_tokens: int = 0
    cpu_attended_tokens: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    executor_busy_ns: int = 0
    cpu_wait_ns: int = 0
    cpu_attention_ns: int = 0
    planning_ns: int = 0
    cpu_threads_grown: int = 0
    cpu_threads_shrunk: int = 0
    stalls: int = 0
    """Times that requests were in hand and nothing moved."""

    def add(self, result: IterationResult) -> None:
        self.gpu_attended_tokens += result.gpu_attended_tokens
        self.cpu_attended_tokens += result.cpu_attended_tokens
        self.swapped_out_bytes += result.swapped_out_bytes
        self.swapped_in_bytes += result.swapped_in_bytes
        self.executor_busy_ns += result.timings.total_ns
        self.cpu_wait_ns += result.timings.cpu_wait_ns
        self.cpu_attention_ns += result.timings.cpu_attention_ns


@dataclass(slots=True)
class ClassCounters:
    """Requests of one service class since the planner started."""

    in_time: int = 0
    """Finished with their targets met."""
    late: int = 0
    """Finished with a target missed."""
    refused: int = 0
    """Because they would have been late."""


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Requests of one service class at one moment."""

    name: str
    num_waiting: int
    num_running: int


class ClassTallies:
    """Keeps count of every class's requests."""

    def __init__(self, names: Iterable[str]) -> None:
        self.counters = {name: ClassCounters() for name in sorted(names)}
        self._num_in_hand = dict.fromkeys(self.counters, 0)

    def accept(self, name: str) -> None:
        self._num_in_hand[name] += 1

    def refuse(self, name: str) -> None:
        """For being late."""
        self.counters[name].refused += 1

    def end(self, name: str) -> None:
        """However."""
        self._num_in_hand[name] -= 1

    def judge(self, name: str, targets_met: bool | None) -> None:
        """One finished; None where nothing was due."""
        if targets_met is not None:
            self.counters[name].in_time += targets_met
            self.counters[name].late += not targets_met

    def loads(self, num_waiting_of: Callable[[str], int]) -> tuple[ClassLoad, ...]:
        """By name."""
        waiting = {name: num_waiting_of(name) for name in self.counters}
        return tuple(ClassLoad(name, num, self._num_in_hand[name] - num) for name, num in waiting.items())


@dataclass(frozen=True, slots=True)
class Load:
    """The load at one moment."""

    num_waiting: int = 0
    num_running: int = 0
    max_waiting: int = 0
    gpu_blocks_used: int = 0
    gpu_blocks: int = 0
    host_blocks_used: int = 0
    host_blocks: int = 0
    pool_blocks_used: tuple[int, ...] = ()
    """By host pool."""
    classes: tuple[ClassLoad, ...] = ()
    """By name."""


class FinishRate:
    """How fast requests have ended of late: a place in a full queue comes free at this rate."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=32)

    def add(self, now_s: float) -> None:
        """A request has ended."""
        self._ends_s.append(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until a place is likely to be free; 1 where nothing is known."""
        if not self._ends_s:
            return 1.0
        per_end_s = (now_s - self._ends_s[0]) / len(self._ends_s)
        return bounded_retry_s(per_end_s)


def bounded_retry_s(seconds: float) -> float:
    """No caller is told to come back at once, or to stay away for long on a guess."""
    return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)
