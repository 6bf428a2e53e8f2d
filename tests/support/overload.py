"""A workload through the serving scheduler on a simulated machine, with classes, and with refusals where it refuses."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from planner_svc.scheduler import LateError, Scheduler, SequenceRequest, ServiceClass
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.metrics import Served
from planner_svc.simulator.spec import Profile
from svc_common.plan import IterationPlan, IterationResult, Sampling
from svc_common.workloads.workload import Arrival


@dataclass
class Outcome:
    """One request: what became of it."""

    service_class: ServiceClass
    served: Served
    refusal: LateError | None = None

    @property
    def in_time(self) -> bool:
        targets = self.service_class.targets
        assert targets is not None
        return self.refusal is None and self.served.meets(targets)


def run_classes(profile: Profile, arrivals: Sequence[tuple[Arrival, ServiceClass]]) -> list[Outcome]:
    """One plan ahead, as the engine; to the end."""
    return _Run(profile).run(arrivals)


class _Run:
    def __init__(self, profile: Profile) -> None:
        capacity = profile.capacity(profile.offload_gpu_blocks, profile.host_pools)
        estimator = profile.estimator
        self.scheduler = Scheduler(capacity, estimator, "auto", 2**31)
        self.executor = SimulatedExecutor(estimator, estimator.kv_bytes_per_token)
        self.waiting: deque[IterationPlan] = deque()
        self.running: tuple[float, IterationResult] | None = None
        self.by_sequence: dict[int, Outcome] = {}

    def run(self, arrivals: Sequence[tuple[Arrival, ServiceClass]]) -> list[Outcome]:
        outcomes = []
        for arrival, service_class in arrivals:
            self._advance_to(arrival.at_s)
            outcome = Outcome(service_class, Served(arrival.at_s, arrival.output_tokens))
            outcomes.append(outcome)
            request = SequenceRequest(
                (0,) * arrival.prompt_tokens,
                arrival.output_tokens,
                Sampling(),
                frozenset(),
                service_class.targets,
                service_class,
            )
            try:
                self.by_sequence[self.scheduler.add(request, arrival.at_s)] = outcome
            except LateError as error:
                outcome.refusal = error
                continue
            self._pump(arrival.at_s)
        self._advance_to(float("inf"))
        assert all(item.refusal or item.served.finished for item in outcomes)
        return outcomes

    def _advance_to(self, until_s: float) -> None:
        while self.running is not None and self.running[0] <= until_s:
            now, result = self.running
            self.running = None
            for event in self.scheduler.apply(result, now).tokens:
                self.by_sequence[event.sequence_id].served.take_token(now)
            self._start_next(now)
            self._pump(now)

    def _pump(self, now: float) -> None:
        while (plan := self.scheduler.plan(now)) is not None:
            self.waiting.append(plan)
            if self.running is None:
                self._start_next(now)

    def _start_next(self, now: float) -> None:
        if self.waiting:
            seconds, result = self.executor.run(self.waiting.popleft())
            self.running = (now + seconds, result)
