"""The event loop: arrivals and ends of iterations, in order of time; one plan runs and one waits, as in the engine."""

from collections import deque
from collections.abc import Callable, Sequence

from planner_svc.scheduler import SequenceRequest, Targets
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.metrics import Served
from planner_svc.simulator.policy import Policy
from planner_svc.simulator.workload import Arrival
from svc_common.plan import IterationPlan, IterationResult, Sampling

Progress = Callable[[int, int], None]
"""Told how many requests of how many have finished."""


class StalledError(Exception):
    """The policy has requests left and plans nothing."""


class Simulation:
    """One run of one workload. Deterministic."""

    def __init__(
        self, policy: Policy, executor: SimulatedExecutor, progress: Progress = lambda done, total: None
    ) -> None:
        self._policy = policy
        self._executor = executor
        self._progress = progress
        self._waiting: deque[IterationPlan] = deque()
        self._running: tuple[float, IterationResult] | None = None
        self._served: dict[int, Served] = {}
        self._num_finished = 0
        self.num_iterations = 0

    def run(self, arrivals: Sequence[Arrival], targets: Targets | None) -> list[Served]:
        """All requests in order of arrival. `targets`: what each asks for. Raises StalledError."""
        requests: list[Served] = []
        for arrival, following in zip(arrivals, [*arrivals[1:], None], strict=True):
            self._advance_to(arrival.at_s)
            request = SequenceRequest(
                (0,) * arrival.prompt_tokens, arrival.output_tokens, Sampling(), frozenset(), targets
            )
            served = Served(arrival.at_s, arrival.output_tokens)
            requests.append(served)
            self._served[self._policy.add(request, arrival.at_s)] = served
            if following is None or following.at_s > arrival.at_s:
                self._pump(arrival.at_s)
        self._advance_to(float("inf"))
        if self._num_finished < len(requests):
            raise StalledError(f"{len(requests) - self._num_finished} of {len(requests)} requests are never planned")
        return requests

    def _advance_to(self, until_s: float) -> None:
        """Ends every iteration that is over by then."""
        while self._running is not None and self._running[0] <= until_s:
            now, result = self._running
            self._running = None
            for event in self._policy.apply(result, now).tokens:
                served = self._served[event.sequence_id]
                served.take_token(now)
                if event.finish:
                    self._num_finished += 1
                    self._progress(self._num_finished, len(self._served))
            self._start_next(now)
            self._pump(now)

    def _pump(self, now: float) -> None:
        """Plans as far ahead as the policy does."""
        while (plan := self._policy.plan(now)) is not None:
            self._waiting.append(plan)
            if self._running is None:
                self._start_next(now)

    def _start_next(self, now: float) -> None:
        if self._waiting:
            seconds, result = self._executor.run(self._waiting.popleft())
            self._running = (now + seconds, result)
            self.num_iterations += 1
