"""Plans whose results are still to come: in what order they are due, and when the next one can begin to run."""

from collections import deque
from dataclasses import dataclass

from planner_svc.estimator import IterationLoad
from svc_common.plan import IterationResult, Mode

_MOST = 2
"""One plan runs, one waits."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is kept of a plan until its result comes."""

    iteration: int
    mode: Mode
    computes: bool
    """False: it only releases or moves."""
    load: IterationLoad
    """What the estimator was asked."""
    expected: tuple[int, ...]
    """Sequences that get a token, in the result's order."""
    predicted_s: float


class InFlight:
    """Of one epoch. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._plans: deque[Planned] = deque()
        self._running_since_s = 0.0
        """When the oldest one began, as far as is known."""

    def __len__(self) -> int:
        """Plans."""
        return len(self._plans)

    @property
    def is_full(self) -> bool:
        """Whether a result must come before the next plan."""
        return len(self._plans) == _MOST

    def add(self, planned: Planned, now: float) -> None:
        """It is sent at `now`."""
        if not self._plans:
            self._running_since_s = now
        self._plans.append(planned)

    def start_s(self, now: float) -> float:
        """When the next plan will begin to run: after those in flight."""
        return max(now, self._running_since_s + sum([planned.predicted_s for planned in self._plans]))

    def take(self, result: IterationResult, now: float) -> Planned:
        """The plan that the result, which came at `now`, answers.

        Raises ValueError, and changes nothing, for a result that failed or that does not answer the oldest plan.
        """
        if result.error is not None:
            raise ValueError(f"iteration {result.iteration} failed, its tokens can't be applied: {result.error.value}")
        if not self._plans or result.iteration != self._plans[0].iteration:
            raise ValueError(f"iteration {result.iteration} is not the one expected next")
        if tuple([sequence_id for sequence_id, _ in result.tokens]) != self._plans[0].expected:
            raise ValueError(f"iteration {result.iteration} yields tokens of other sequences than planned")
        self._running_since_s = now
        return self._plans.popleft()
