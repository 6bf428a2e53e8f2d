"""Turns requests and results into iteration plans: the only code that decides. No I/O, clock or log."""

from planner_svc.scheduler.admission import AdmissionError, AdmissionReason, LateError
from planner_svc.scheduler.demand import Demand
from planner_svc.scheduler.events import Applied, Counters, History, TokenEvent
from planner_svc.scheduler.limits import Capacity, ModePolicy
from planner_svc.scheduler.scheduler import Scheduler
from planner_svc.scheduler.sequence import DEFAULT_CLASS, Sequence, SequenceRequest, ServiceClass, Targets
from planner_svc.scheduler.trials import MAX_LOSSES, MAX_LOSSES_IN_A_ROW, Verdict

__all__ = [
    "DEFAULT_CLASS",
    "MAX_LOSSES",
    "MAX_LOSSES_IN_A_ROW",
    "AdmissionError",
    "AdmissionReason",
    "Applied",
    "Capacity",
    "Counters",
    "Demand",
    "History",
    "LateError",
    "ModePolicy",
    "Scheduler",
    "Sequence",
    "SequenceRequest",
    "ServiceClass",
    "Targets",
    "TokenEvent",
    "Verdict",
]
