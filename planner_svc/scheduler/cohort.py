"""A cohort's step under way: sequences on the host that go through the layers at their own pace, some in each plan."""

from planner_svc.scheduler.batch import CohortPart
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence, State


class Cohort:
    """At most one step at a time. Once begun it goes on in every plan until it ends."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.members: list[Sequence] = []
        """Of the step under way. They decode one token; one that was finished meanwhile keeps its blocks."""
        self.next_layer = 0

    @property
    def is_under_way(self) -> bool:
        return bool(self.members)

    def take(self, part: CohortPart) -> None:
        """A plan was made that holds this part."""
        if not part.is_last:
            self.members = part.sequences
            self.next_layer = part.start_layer + part.num_layers
            if part.start_layer == 0:
                for sequence in self.members:
                    sequence.state = State.STEPPING
            return
        for sequence in self.members:
            if sequence.state is State.STEPPING:
                sequence.state = State.RUNNING
            else:
                self._residency.leave(sequence, State.FINISHED)
        self.members = []
        self.next_layer = 0
