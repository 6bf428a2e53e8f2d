"""Says how long a batch will take, from a machine's figures or from measured tables; the scheduler chooses by it."""

from planner_svc.estimator.calibration import Calibration
from planner_svc.estimator.estimator import (
    EMPTY_LOAD,
    NO_COHORT,
    CohortLoad,
    Estimator,
    IterationLoad,
    PoolLoads,
    SubBatchLoad,
    hidden_cohort_layers,
    slowest_pool_s,
)
from planner_svc.estimator.hardware import HardwareSpec, ModelFigures
from planner_svc.estimator.roofline import RooflineEstimator
from planner_svc.estimator.table_estimator import TableEstimator
from planner_svc.estimator.tables import DecodePoint, LinearPoint, OperationTables, PrefillPoint
from planner_svc.estimator.terms import Factors, Terms
from planner_svc.estimator.timeline import Timeline

__all__ = [
    "EMPTY_LOAD",
    "NO_COHORT",
    "Calibration",
    "CohortLoad",
    "DecodePoint",
    "Estimator",
    "Factors",
    "HardwareSpec",
    "IterationLoad",
    "LinearPoint",
    "ModelFigures",
    "OperationTables",
    "PoolLoads",
    "PrefillPoint",
    "RooflineEstimator",
    "SubBatchLoad",
    "TableEstimator",
    "Terms",
    "Timeline",
    "hidden_cohort_layers",
    "slowest_pool_s",
]
