"""Several runs of one workload: profiles, changed figures, policies and rates, one after another or side by side."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

from planner_svc.classes import ServiceClasses
from planner_svc.simulator.classes import check_names, class_of, one_class
from planner_svc.simulator.metrics import Metrics
from planner_svc.simulator.runs import find_capacity, largest_request, run
from planner_svc.simulator.simulation import Observer, Progress, ignore
from planner_svc.simulator.spec import Profile
from svc_common.workloads import InputError
from svc_common.workloads.workload import Arrival

Changes = tuple[tuple[str, float], ...]
"""Figures of a profile that are replaced, by their key."""


@dataclass(frozen=True, slots=True)
class Case:
    """A policy on a machine."""

    profile: Profile
    changes: Changes
    policy: str
    threads: tuple[int, int] | None = None
    """Fewest and most that attend on the CPU, which follow the load; None: their number is the machine's."""

    @property
    def machine(self) -> str:
        """The profile with its changes, as a reader would name it."""
        return " ".join([self.profile.name, *(f"{key}={value:.6g}" for key, value in self.changes)])

    @property
    def label(self) -> str:
        return f"{self.policy} on {self.machine}"


@dataclass(frozen=True, slots=True)
class Search:
    """For the highest rate at which a share of the requests is in time."""

    share: float
    first_rate: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the answer: a case at a rate, or the search for one."""

    case: Case
    at: float | Search


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task found."""

    case: Case
    rate: float
    """Requests a second; of a search that found none, 0."""
    num_requests: int
    refused: int
    """Of them: larger than what the model or the machine can hold. They count as not in time."""
    metrics: Metrics | None
    """Of the others. None where a search found no rate."""


Titled = Callable[[str], Progress]
"""Begins the report of one run, by what a reader would call it."""


def solve(
    task: Task,
    arrivals: Sequence[Arrival],
    begin: Titled = lambda title: ignore,
    observer: Observer | None = None,
    classes: ServiceClasses | None = None,
) -> Outcome:
    """Raises InputError. `observer`: of the run at the given rate, or at the one found. `classes`: as in `run`."""
    case, at = task.case, task.at
    check_names(arrivals, classes or one_class(case.profile.targets))
    limit = largest_request(case.policy, case.profile)
    fitting = [item for item in arrivals if item.prompt_tokens + item.output_tokens <= limit]
    if not fitting:
        raise InputError(f"--workload: with {case.label} no request fits: the largest may have {limit} tokens")

    def num_judged(items: Sequence[Arrival]) -> int:
        return len(items) if classes is None else sum(class_of(item, classes).targets is not None for item in items)

    def measured(rate: float, observer: Observer | None = None) -> Metrics:
        report = begin(f"{case.label} at {rate:.3g} req/s")
        metrics = run(case.policy, case.profile, fitting, rate, report, observer or ignore, True, classes, case.threads)
        return replace(metrics, slo=metrics.slo * num_judged(fitting) / max(1, num_judged(arrivals)))

    refused = len(arrivals) - len(fitting)
    if not isinstance(at, Search):
        return Outcome(case, at, len(arrivals), refused, measured(at, observer))
    tried: dict[float, Metrics] = {}

    def is_met(rate: float) -> bool:
        tried[rate] = measured(rate)
        return tried[rate].slo >= at.share

    rate = find_capacity(is_met, at.first_rate, at.tolerance)
    if rate and observer is not None:
        tried[rate] = measured(rate, observer)
    return Outcome(case, rate, len(arrivals), refused, tried.get(rate))


def solve_beside(
    tasks: Sequence[Task], arrivals: Sequence[Arrival], num_processes: int, classes: ServiceClasses | None = None
) -> Iterator[Outcome]:
    """In the order of the tasks, as soon as each is known; all of them run in processes that end with this one."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(num_processes, len(tasks)), _begin_process, (arrivals, classes)) as pool:
        yield from pool.imap(_solve_here, tasks)


_arrivals: Sequence[Arrival] = ()
_classes: ServiceClasses | None = None
"""Both of a process that solves: sent once, not with each task."""


def _begin_process(arrivals: Sequence[Arrival], classes: ServiceClasses | None) -> None:
    global _arrivals, _classes
    _arrivals, _classes = arrivals, classes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent is interrupted too, and ends this process.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed can't tell its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _solve_here(task: Task) -> Outcome:
    return solve(task, _arrivals, classes=_classes)
