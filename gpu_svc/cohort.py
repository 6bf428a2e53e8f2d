"""Follows the decode step of a decoupled cohort through a plan's parts and checks them; holds no tensor."""

from collections.abc import Iterable

from gpu_svc.limits import InvalidPlanError
from gpu_svc.sequences import SequenceTable
from svc_common.plan import CohortStep, IterationPlan, SubBatch, Tier


class CohortSteps:
    """One step at a time; between two there is nothing to follow."""

    def __init__(self, table: SequenceTable, num_layers: int) -> None:
        self._table = table
        self._num_layers = num_layers
        self._members: tuple[int, ...] = ()  # of the step under way
        self._next_layer = 0

    def check_changes(self, plan: IterationPlan) -> None:
        """Before they are applied: a running step keeps its sequences as they are. Raises InvalidPlanError."""
        if not self._members:
            return
        changes = (
            ("is released", plan.released),
            ("moves", [swap.sequence_id for swap in plan.swaps]),
            ("gets blocks", [more.sequence_id for more in plan.new_blocks]),
        )
        for what, ids in changes:
            _refuse_any(ids, self._members, f"{what} while its cohort's step runs")

    def check_work(self, plan: IterationPlan) -> None:
        """After the changes: whether the step can begin, or go on, as planned. Raises InvalidPlanError."""
        step = plan.cohort
        members = self._members if step is None else step.sequence_ids
        if members:
            for batch in plan.sub_batches:
                _refuse_any(batch.sequence_ids, members, "is in a sub-batch while its cohort's step runs")
        if step is None:
            return
        if step.start_layer < 0 or step.num_layers < 1 or step.num_layers > self._num_layers - step.start_layer:
            raise InvalidPlanError(
                f"a cohort's part has {step.num_layers} layers from layer {step.start_layer} on; "
                f"at least 1, and the model has {self._num_layers}"
            )
        if step.start_layer != self._next_layer:
            raise InvalidPlanError(
                f"a cohort's part begins at layer {step.start_layer}, its step is at {self._next_layer}"
            )
        if not self._members:
            self._check_members(step.sequence_ids)
        elif step.sequence_ids != self._members:
            ids, began_with = list(step.sequence_ids), list(self._members)
            raise InvalidPlanError(f"a cohort's step goes on with sequences {ids}, it began with {began_with}")

    def _check_members(self, sequence_ids: tuple[int, ...]) -> None:
        if not sequence_ids:
            raise InvalidPlanError("a cohort has no sequences")
        if len(set(sequence_ids)) < len(sequence_ids):
            repeated = next(one for one in sequence_ids if sequence_ids.count(one) > 1)
            raise InvalidPlanError(f"sequence {repeated} appears twice in the cohort")
        self._table.check_num_tokens(len(sequence_ids))
        self._table.check_decodes(sequence_ids, Tier.HOST)

    def advance(self, step: CohortStep) -> bool:
        """Counts the layers of a part that has run. Whether the step has ended: then its rows yield a token."""
        self._next_layer = step.start_layer + step.num_layers
        if self._next_layer < self._num_layers:
            self._members = step.sequence_ids
            return False
        self._members, self._next_layer = (), 0
        self._table.advance(SubBatch(cpu_decodes=step.sequence_ids))
        return True


def _refuse_any(ids: Iterable[int], members: tuple[int, ...], why: str) -> None:
    for sequence_id in sorted(set(members).intersection(ids)):
        raise InvalidPlanError(f"sequence {sequence_id} {why}")
