"""Tables are known by the policy that was asked for and by what the executor made of it."""

from planner_svc.estimator import LinearPoint, OperationTables, TableEstimator
from planner_svc.policy_tables import PolicyTables
from svc_common.policy import ExecutionPolicy

ASKED, MADE, OTHER = ExecutionPolicy(6, 0, 4), ExecutionPolicy(5, 0, 4), ExecutionPolicy(4, 2, 4)


def tables(layer_s: float) -> OperationTables:
    return OperationTables((LinearPoint(1, layer_s),), (), (), (), (LinearPoint(1, 0.0),), 0.0, 0.0)


def make() -> PolicyTables:
    return PolicyTables(lambda measured, policy: TableEstimator(measured, 6, policy))


def test_what_was_measured_is_known_by_both_names() -> None:
    known, measured = make(), tables(1.0)
    known.add(measured, MADE, ASKED)
    assert known.tables(ASKED) is known.tables(MADE) is measured
    assert known.estimator(ASKED) is known.estimator(MADE)
    assert [known.knows(policy) for policy in (ASKED, MADE, OTHER, None)] == [True, True, False, False]
    assert (known.tables(OTHER), known.estimator(None)) == (None, None)


def test_operations_on_both_processors_hold_for_any_policy_without_tables_of_its_own() -> None:
    known, own, both = make(), tables(1.0), tables(2.0)
    known.add(own, MADE, MADE)
    known.of_both = both
    assert [known.knows(policy) for policy in (MADE, OTHER, None)] == [True, True, False]
    assert known.tables(MADE) is own
    assert known.tables(OTHER) is both
    assert known.estimator(OTHER) is not known.estimator(MADE)
