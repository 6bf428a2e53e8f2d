"""The decode step of a decoupled cohort: checks its parts, keeps what passes from one iteration to the next."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from gpu_svc.batch import Batch, BatchBuilder
from gpu_svc.limits import InvalidPlanError
from gpu_svc.sequences import SequenceTable
from svc_common.plan import CohortStep, IterationPlan, SubBatch, Tier
from svc_common.trace import COHORT


@dataclass(frozen=True, slots=True)
class CohortPart:
    """What one iteration does of a step."""

    sequence_ids: tuple[int, ...]
    batch: Batch
    """The cohort's new tokens; the same through the whole step."""
    hidden: Tensor | None
    """[n, hidden_size]: before it runs None or what the part before left; once it has run, after its last layer."""
    layers: range


class Cohort:
    """One step at a time. Between steps it holds nothing, and between parts nothing of it is in flight."""

    def __init__(self, table: SequenceTable, builder: BatchBuilder, num_layers: int) -> None:
        self._table = table
        self._builder = builder
        self._num_layers = num_layers
        self._last: CohortPart | None = None
        """Of the step under way, what ran last."""

    # --- checks

    def check_changes(self, plan: IterationPlan) -> None:
        """Whether a running step keeps its sequences as they are. Raises InvalidPlanError."""
        if self._last is None:
            return
        changes = (
            ("is released", plan.released),
            ("moves", [swap.sequence_id for swap in plan.swaps]),
            ("gets blocks", [more.sequence_id for more in plan.new_blocks]),
        )
        for what, ids in changes:
            _refuse_any(ids, self._last.sequence_ids, f"{what} while its cohort's step runs")

    def check_work(self, plan: IterationPlan) -> None:
        """Whether the plan's part follows, after its changes were applied. Raises InvalidPlanError."""
        step = plan.cohort
        at_work = step or self._last
        if at_work is not None:
            for batch in plan.sub_batches:
                _refuse_any(batch.sequence_ids, at_work.sequence_ids, "is in a sub-batch while its cohort's step runs")
        if step is None:
            return
        end = step.start_layer + step.num_layers
        if step.start_layer < 0 or step.num_layers < 1 or end > self._num_layers:
            raise InvalidPlanError(
                f"a cohort's part has {step.num_layers} layers from layer {step.start_layer} on; "
                f"at least 1, and the model has {self._num_layers}"
            )
        next_layer = self._last.layers.stop if self._last else 0
        if step.start_layer != next_layer:
            raise InvalidPlanError(f"a cohort's part begins at layer {step.start_layer}, its step is at {next_layer}")
        if self._last is None:
            self._check_members(step.sequence_ids)
        elif step.sequence_ids != self._last.sequence_ids:
            ids, began_with = list(step.sequence_ids), list(self._last.sequence_ids)
            raise InvalidPlanError(f"a cohort's step goes on with sequences {ids}, it began with {began_with}")

    def _check_members(self, sequence_ids: tuple[int, ...]) -> None:
        if not sequence_ids:
            raise InvalidPlanError("a cohort has no sequences")
        if len(set(sequence_ids)) < len(sequence_ids):
            repeated = next(one for one in sequence_ids if sequence_ids.count(one) > 1)
            raise InvalidPlanError(f"sequence {repeated} appears twice in the cohort")
        self._table.check_num_tokens(len(sequence_ids))
        self._table.check_decodes(sequence_ids, Tier.HOST)

    # --- progress

    def part(self, step: CohortStep) -> CohortPart:
        """What is to run of a step, of which `check_work` has approved."""
        layers = range(step.start_layer, step.start_layer + step.num_layers)
        if self._last is not None:
            return replace(self._last, layers=layers)
        batch = self._builder.build(SubBatch(cpu_decodes=step.sequence_ids), COHORT)
        return CohortPart(step.sequence_ids, batch, None, layers)

    def advance(self, part: CohortPart, hidden: Tensor) -> bool:
        """Takes over what a part has computed. Whether it was the step's last, whose rows yield a token."""
        if part.layers.stop < self._num_layers:
            self._last = replace(part, hidden=hidden)
            return False
        self._table.advance(SubBatch(cpu_decodes=part.sequence_ids))
        self._last = None
        return True


def _refuse_any(ids: Iterable[int], members: tuple[int, ...], why: str) -> None:
    for sequence_id in sorted(set(members).intersection(ids)):
        raise InvalidPlanError(f"sequence {sequence_id} {why}")
