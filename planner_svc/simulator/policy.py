"""What the simulator asks of whatever decides: the serving Scheduler, or a baseline."""

from typing import Protocol

from planner_svc.scheduler import Applied, SequenceRequest
from svc_common.plan import IterationPlan, IterationResult


class Policy(Protocol):
    """Plans name sequences and tiers; a baseline may leave block ids out."""

    def add(self, request: SequenceRequest, now: float) -> int:
        """Queues a request and returns its sequence id, counted from 1. LateError: it is refused."""
        ...

    def plan(self, now: float) -> IterationPlan | None:
        """The next iteration; None where there is nothing to do, or where the last plan's result must come first."""
        ...

    def apply(self, result: IterationResult, now: float) -> Applied:
        """Takes the result of the oldest plan."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV."""
        ...

    @property
    def num_running(self) -> int:
        """Requests that hold KV."""
        ...

    @property
    def gpu_blocks_used(self) -> int:
        """Those of the latest plan included."""
        ...

    @property
    def host_blocks_used(self) -> int:
        """Those of the latest plan included."""
        ...
