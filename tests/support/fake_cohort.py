"""What the protocol promises about modes and about the steps of a decoupled cohort, as FakeExecutor checks it."""

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING

from neoflex.v1 import executor_pb2

if TYPE_CHECKING:  # It needs this module.
    from support.fake_workers import Held


class FakeCohort:
    """Follows the step under way."""

    def __init__(self, num_layers: int, block_tokens: int) -> None:
        self._num_layers = num_layers
        self._block_tokens = block_tokens
        self._ids: list[int] = []  # of the step under way
        self._next_layer = 0

    def problems_of_changes(self, plan: executor_pb2.IterationPlan) -> Iterator[str]:
        """Before they are applied: a running step keeps its sequences as they are."""
        changed = [*plan.released_sequence_ids]
        changed += [swap.sequence_id for swap in plan.swaps]
        changed += [new.sequence_id for new in plan.new_blocks]
        yield from _both(changed, self._ids, "changes while its cohort's step runs")

    def problems_of_work(self, plan: executor_pb2.IterationPlan, held: Mapping[int, "Held"]) -> Iterator[str]:
        """After the changes."""
        yield from _problems_of_mode(plan)
        members = list(plan.cohort.sequence_ids) or self._ids
        for batch in plan.sub_batches:
            working = [chunk.sequence_id for chunk in batch.prefills]
            working += [*batch.gpu_decode_sequence_ids, *batch.cpu_decode_sequence_ids]
            yield from _both(working, members, "is in a sub-batch and in the cohort")
        if not plan.HasField("cohort"):
            return
        step = plan.cohort
        if step.start_layer != self._next_layer or not 1 <= step.num_layers <= self._num_layers - step.start_layer:
            yield f"cohort: {step.num_layers} layers from {step.start_layer} on, its step is at {self._next_layer}"
        if self._ids and members != self._ids:
            yield f"cohort: {members} go on with the step of {self._ids}"
        if not self._ids:
            yield from self._problems_of_beginning(members, held)

    def _problems_of_beginning(self, members: list[int], held: Mapping[int, "Held"]) -> Iterator[str]:
        if not members or len(set(members)) < len(members):
            yield f"cohort: {members} begin a step"
        for sequence_id in members:
            one = held[sequence_id]
            room = len(one.blocks) * self._block_tokens
            on_host = one.tier == executor_pb2.TIER_HOST
            if not on_host or one.num_computed != len(one.tokens) - 1 or one.num_computed >= room:
                yield f"sequence {sequence_id} cannot decode in a cohort: {one}"

    def advance(self, step: executor_pb2.CohortStep) -> list[int]:
        """Sequences that get a token: none before the last layer."""
        self._ids, self._next_layer = list(step.sequence_ids), step.start_layer + step.num_layers
        if self._next_layer < self._num_layers:
            return []
        ended, self._ids, self._next_layer = self._ids, [], 0
        return ended


def _problems_of_mode(plan: executor_pb2.IterationPlan) -> Iterator[str]:
    mode = executor_pb2.ExecutionMode.Name(plan.mode)
    if (plan.mode == executor_pb2.EXECUTION_MODE_DECOUPLED) != plan.HasField("cohort"):
        yield f"{mode}, cohort: {plan.HasField('cohort')}"
    one_batch = (executor_pb2.EXECUTION_MODE_SAME_LAYER, executor_pb2.EXECUTION_MODE_DECOUPLED)
    if len(plan.sub_batches) > (1 if plan.mode in one_batch else 2):
        yield f"{mode}: {len(plan.sub_batches)} sub-batches"
    no_cpu = (executor_pb2.EXECUTION_MODE_GPU_ONLY, executor_pb2.EXECUTION_MODE_DECOUPLED)
    if plan.mode in no_cpu and any(batch.cpu_decode_sequence_ids for batch in plan.sub_batches):
        yield f"{mode}: a sub-batch has CPU decodes"


def _both(ids: list[int], members: Container[int], what: str) -> Iterator[str]:
    return (f"sequence {sequence_id} {what}" for sequence_id in ids if sequence_id in members)
