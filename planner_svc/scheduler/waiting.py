"""Sequences without blocks, in lanes that each keep their order, so that no lane hides another."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter

from planner_svc.scheduler.prefix_sums import DueTokens
from planner_svc.scheduler.sequence import Sequence, ServiceClass
from planner_svc.scheduler.shares import Shares
from planner_svc.scheduler.urgency import is_aged_prompt

_arrival = attrgetter("sequence_id")
_LEAST = 8
"""Prompts of a lane that a plan looks at, however many lanes there are."""


def _due(sequence: Sequence) -> tuple[float, int]:
    return sequence.due_s, sequence.sequence_id


class ClassLanes:
    """Prompts of one class: those whose first token is due, by that; those that can't be in time any more, and those
    without targets, by arrival.
    """

    def __init__(self, service_class: ServiceClass) -> None:
        self.service_class = service_class
        self.due: list[Sequence] = []
        self.late: OrderedDict[int, Sequence] = OrderedDict()
        self.untargeted: OrderedDict[int, Sequence] = OrderedDict()
        self.tokens = DueTokens()
        """Of all but the late ones."""
        self.num_late_tokens = 0

    def __len__(self) -> int:
        return len(self.due) + len(self.late) + len(self.untargeted)

    def append(self, sequence: Sequence) -> None:
        if sequence.request.targets:
            insort(self.due, sequence, key=_due)
        else:
            self.untargeted[sequence.sequence_id] = sequence
        self.tokens.add(sequence.due_s, sequence.num_tokens)

    def set_aside_late(self, now: float) -> list[Sequence]:
        """Those whose first token is overdue; returns them."""
        num_late = bisect_left(self.due, (now, 0), key=_due)
        overdue = self.due[:num_late]
        for sequence in overdue:
            self.late[sequence.sequence_id] = sequence
            self.tokens.add(sequence.due_s, -sequence.num_tokens)
            self.num_late_tokens += sequence.num_tokens
        del self.due[:num_late]
        return overdue

    def remove(self, sequence: Sequence) -> None:
        if self.late.pop(sequence.sequence_id, None) is not None:
            self.num_late_tokens -= sequence.num_tokens
            return
        if self.untargeted.pop(sequence.sequence_id, None) is None:
            del self.due[bisect_left(self.due, _due(sequence), key=_due)]
        self.tokens.add(sequence.due_s, -sequence.num_tokens)

    def oldest(self) -> Iterator[Sequence]:
        """The first of each lane."""
        for lane in (self.due, self.late.values(), self.untargeted.values()):
            yield from islice(lane, 1)


class WaitingQueue:
    """Preempted ones first; then by class, the highest priority first: those due, those late, those without targets.

    What a plan does here takes no longer the more wait, but for a copy of the list of those due in one class.
    """

    def __init__(self) -> None:
        self._returned: dict[int, int] = {}
        """Tokens to compute again, as far as known when it came back, by sequence id."""
        self._returned_order: list[Sequence] = []
        self._classes: dict[str, ClassLanes] = {}
        """Of the highest priority first."""
        self.num_returned_tokens = 0
        """To compute again."""
        self.shares = Shares()

    def __len__(self) -> int:
        return len(self._returned_order) + sum(len(lanes) for lanes in self._classes.values())

    def __iter__(self) -> Iterator[Sequence]:
        """Lane by lane. Not to be changed meanwhile."""
        yield from self._returned_order
        for lanes in self._classes.values():
            yield from chain(lanes.due, lanes.late.values(), lanes.untargeted.values())

    @property
    def classes(self) -> Iterable[ClassLanes]:
        """The lanes of each class that was ever here."""
        return self._classes.values()

    @property
    def num_returned(self) -> int:
        """Those that ran before."""
        return len(self._returned_order)

    def num_of(self, name: str) -> int:
        """Of a class."""
        num_new = len(self._classes[name]) if name in self._classes else 0
        return num_new + sum(item.request.service_class.name == name for item in self._returned_order)

    def first(self, num_of_each: int) -> list[Sequence]:
        """Of each kind of lane; classes that have such a lane share the number."""
        found = self._returned_order[:num_of_each]
        kinds = zip(*[(c.due, c.late.values(), c.untargeted.values()) for c in self._classes.values()], strict=True)
        for kind in kinds:
            lanes = [lane for lane in kind if lane]
            num_of_lane = max(_LEAST, num_of_each // len(lanes)) if len(lanes) > 1 else num_of_each
            found += chain.from_iterable(islice(lane, num_of_lane) for lane in lanes)
        return found

    @property
    def head(self) -> Sequence | None:
        """The first of the first lane that has any."""
        return next(iter(self), None)

    def append(self, sequence: Sequence) -> None:
        """A new arrival."""
        service_class = sequence.request.service_class
        lanes = self._classes.get(service_class.name)
        if lanes is None:
            lanes = self._classes[service_class.name] = ClassLanes(service_class)
            by_priority = sorted(self._classes.items(), key=lambda item: -item[1].service_class.priority)
            self._classes = dict(by_priority)
            self.shares.meet(service_class)
        lanes.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """One that ran and must be recomputed."""
        insort(self._returned_order, sequence, key=_arrival)
        self._returned[sequence.sequence_id] = sequence.num_tokens
        self.num_returned_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Admitted or finished."""
        num_tokens = self._returned.pop(sequence.sequence_id, None)
        if num_tokens is not None:
            self.num_returned_tokens -= num_tokens
            del self._returned_order[bisect_left(self._returned_order, sequence.sequence_id, key=_arrival)]
        else:
            self._classes[sequence.request.service_class.name].remove(sequence)

    def refresh(self, now: float) -> list[Sequence]:
        """Sets aside those whose first token is overdue, and notes which classes compete for the next plan.

        Returns those that were set aside now.
        """
        overdue = [sequence for lanes in self._classes.values() for sequence in lanes.set_aside_late(now)]
        if not self.shares.is_single:
            self.shares.compete(self._competing(now))
        return overdue

    def _competing(self, now: float) -> set[str]:
        """Classes of the highest priority that waits, and those in which one has waited too long."""
        waiting = [lanes for lanes in self._classes.values() if len(lanes)]
        return {
            lanes.service_class.name
            for lanes in waiting
            if lanes.service_class.priority == waiting[0].service_class.priority
            or any(is_aged_prompt(sequence, now) for sequence in lanes.oldest())
        }
