"""The event loop: arrivals and ends of iterations, in order of time; one plan runs and one waits, as in the engine."""

from collections import deque
from collections.abc import Callable, Sequence

from planner_svc.classes import ServiceClasses
from planner_svc.estimator import Timeline
from planner_svc.scheduler import LateError, SequenceRequest, ServiceClass
from planner_svc.simulator.classes import class_of
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.metrics import Served
from planner_svc.simulator.policy import Policy
from svc_common.plan import IterationPlan, IterationResult, Sampling
from svc_common.workloads.workload import Arrival

Progress = Callable[[int, int], None]
"""Told how many requests of how many have finished."""
Observer = Callable[[float, IterationPlan, Timeline, Policy], None]
"""Told of each iteration when it starts: the time in seconds, its plan, how long its lanes work, and who decided it."""


def ignore(*_: object) -> None:
    """A Progress and an Observer for those who don't care."""


class StalledError(Exception):
    """The policy has requests left and plans nothing. `requests`: as far as they came."""

    def __init__(self, requests: list[Served]) -> None:
        num_left = sum(not (item.finished or item.is_refused) for item in requests)
        super().__init__(f"{num_left} of {len(requests)} requests are never planned")
        self.requests = requests


class Simulation:
    """One run of one workload. Deterministic."""

    def __init__(
        self,
        policy: Policy,
        executor: SimulatedExecutor,
        progress: Progress = ignore,
        observer: Observer = ignore,
    ) -> None:
        self._policy = policy
        self._executor = executor
        self._progress = progress
        self._observer = observer
        self._waiting: deque[IterationPlan] = deque()
        self._running: tuple[float, IterationResult] | None = None
        self._served: dict[int, Served] = {}
        self._num_finished = 0
        self._num_requests = 0
        self.num_iterations = 0

    def run(self, arrivals: Sequence[Arrival], classes: ServiceClasses) -> list[Served]:
        """All requests in order of arrival. `classes`: those that they name. Raises StalledError."""
        requests: list[Served] = []
        self._num_requests = len(arrivals)
        for arrival, following in zip(arrivals, [*arrivals[1:], None], strict=True):
            self._advance_to(arrival.at_s)
            requests.append(self._arrive(arrival, class_of(arrival, classes)))
            if following is None or following.at_s > arrival.at_s:
                self._pump(arrival.at_s)
        self._advance_to(float("inf"))
        if self._num_finished < len(requests):
            raise StalledError(requests)
        return requests

    def _arrive(self, arrival: Arrival, service_class: ServiceClass) -> Served:
        """One that the policy refuses is over."""
        prompt, num_tokens = (0,) * arrival.prompt_tokens, arrival.output_tokens
        request = SequenceRequest(prompt, num_tokens, Sampling(), frozenset(), service_class.targets, service_class)
        served = Served(arrival.at_s, num_tokens, service_class=service_class)
        try:
            self._served[self._policy.add(request, arrival.at_s)] = served
        except LateError:
            served.is_refused = True
            self._num_finished += 1
        return served

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
                    self._progress(self._num_finished, self._num_requests)
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
            plan = self._waiting.popleft()
            seconds, result = self._executor.run(plan)
            self._running = (now + seconds, result)
            self._observer(now, plan, self._executor.latest, self._policy)
            self.num_iterations += 1
