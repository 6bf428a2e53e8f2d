"""Says how long a batch will take, from tables measured at start-up; the scheduler compares its choices by it."""

from planner_svc.estimator.calibration import Calibration
from planner_svc.estimator.estimator import EMPTY_LOAD, Estimator, SubBatchLoad
from planner_svc.estimator.table_estimator import TableEstimator
from planner_svc.estimator.tables import DecodePoint, LinearPoint, OperationTables, PrefillPoint

__all__ = [
    "EMPTY_LOAD",
    "Calibration",
    "DecodePoint",
    "Estimator",
    "LinearPoint",
    "OperationTables",
    "PrefillPoint",
    "SubBatchLoad",
    "TableEstimator",
]
