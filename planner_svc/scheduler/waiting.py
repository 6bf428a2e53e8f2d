"""Sequences without blocks, in lanes that each keep the order of arrival, so that no lane hides another."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter

from planner_svc.scheduler.sequence import Sequence

_arrival = attrgetter("sequence_id")


class WaitingQueue:
    """Preempted ones first, then those whose first token is due, those that can't be in time, those without targets.

    No operation that a plan uses depends on how many wait.
    """

    def __init__(self) -> None:
        self._returned: list[Sequence] = []
        self._due: OrderedDict[int, Sequence] = OrderedDict()
        self._late: OrderedDict[int, Sequence] = OrderedDict()
        self._untargeted: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._returned) + len(self._due) + len(self._late) + len(self._untargeted)

    def __iter__(self) -> Iterator[Sequence]:
        """Lane by lane. Not to be changed meanwhile."""
        yield from self._returned
        for lane in (self._due, self._late, self._untargeted):
            yield from lane.values()

    def first(self, num_of_each: int) -> list[Sequence]:
        """Of each lane."""
        lanes = (self._returned, self._due.values(), self._late.values(), self._untargeted.values())
        return list(chain.from_iterable(islice(lane, num_of_each) for lane in lanes))

    @property
    def head(self) -> Sequence | None:
        """The oldest of the first lane that has any."""
        return next(iter(self), None)

    def append(self, sequence: Sequence) -> None:
        """A new arrival."""
        lane = self._due if sequence.request.targets else self._untargeted
        lane[sequence.sequence_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """One that ran and must be recomputed."""
        insort(self._returned, sequence, key=_arrival)

    def set_aside_late(self, now: float) -> None:
        """From the front, those whose first token is overdue."""
        while self._due and (oldest := next(iter(self._due.values()))).due_s < now:
            del self._due[oldest.sequence_id]
            self._late[oldest.sequence_id] = oldest

    def remove(self, sequence: Sequence) -> None:
        """Admitted or finished."""
        for lane in (self._due, self._late, self._untargeted):
            if lane.pop(sequence.sequence_id, None) is not None:
                return
        del self._returned[bisect_left(self._returned, sequence.sequence_id, key=_arrival)]
