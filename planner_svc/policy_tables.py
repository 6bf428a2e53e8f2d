"""Which measured tables, and which estimator over them, hold for which policy; no I/O."""

from collections.abc import Callable

from planner_svc.estimator import OperationTables, TableEstimator
from svc_common.policy import ExecutionPolicy

MakeEstimator = Callable[[OperationTables, ExecutionPolicy | None], TableEstimator]


class PolicyTables:
    """By policy; None stands for the one that the executor makes for itself."""

    def __init__(self, make_estimator: MakeEstimator) -> None:
        self._make_estimator = make_estimator
        self._tables: dict[ExecutionPolicy | None, OperationTables] = {}
        self._estimators: dict[ExecutionPolicy | None, TableEstimator] = {}
        self.of_both: OperationTables | None = None
        """Of operations on both processors, once they are measured: they hold whichever layers run where."""

    def add(self, tables: OperationTables, policy: ExecutionPolicy | None, asked: ExecutionPolicy | None) -> None:
        """Measured under `policy`, which is what the executor made of `asked`."""
        estimator = self._make_estimator(tables, policy)
        for key in {policy, asked}:
            self._tables[key], self._estimators[key] = tables, estimator

    def knows(self, policy: ExecutionPolicy | None) -> bool:
        """Whether there are tables for it: its own, or those of operations on both processors."""
        if policy is not None and policy not in self._tables and self.of_both is not None:
            self.add(self.of_both, policy, policy)
        return policy in self._tables

    def tables(self, policy: ExecutionPolicy | None) -> OperationTables | None:
        return self._tables.get(policy)

    def estimator(self, policy: ExecutionPolicy | None) -> TableEstimator | None:
        return self._estimators.get(policy)
