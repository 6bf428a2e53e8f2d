"""Sequences without blocks, first come first served; preempted ones stand before all that never ran."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from planner_svc.scheduler.sequence import Sequence

_arrival = attrgetter("sequence_id")


class WaitingQueue:
    """Ordered by arrival throughout: whatever ran once arrived before whatever never did.

    No operation that a plan uses depends on how many wait.
    """

    def __init__(self) -> None:
        self._returned: list[Sequence] = []
        self._fresh: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._returned) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        """First to be served first. Not to be changed meanwhile."""
        yield from self._returned
        yield from self._fresh.values()

    @property
    def head(self) -> Sequence | None:
        return next(iter(self), None)

    def append(self, sequence: Sequence) -> None:
        """A new arrival."""
        self._fresh[sequence.sequence_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """One that ran and must be recomputed."""
        insort(self._returned, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Admitted or finished."""
        if self._fresh.pop(sequence.sequence_id, None) is None:
            del self._returned[bisect_left(self._returned, sequence.sequence_id, key=_arrival)]
