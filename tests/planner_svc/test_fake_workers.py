"""FakeExecutor, on which the planner's tests rely, sees a cohort's steps through and notices broken promises."""

from typing import Any

import pytest
from support.fake_workers import FakeExecutor, FakeHost, alphabet

from neoflex.v1 import executor_pb2 as pb

PROMPTS = {1: (3, 4, 5), 2: (6, 7), 3: (8, 9)}
TIERS = {1: pb.TIER_GPU, 2: pb.TIER_HOST, 3: pb.TIER_HOST}


class Executor:
    """Sequence 1 decodes on the GPU, 2 and 3 on the host; a model of three layers."""

    def __init__(self) -> None:
        self.host = FakeHost()
        self.host.alive, self.host.region_epoch = True, 1
        self.fake = FakeExecutor(num_layers=3, host_blocks=8, hosts=[self.host])
        self.fake.epochs.append(pb.OpenEpochRequest(epoch=1))
        self._iteration = 0
        for i, prompt in PROMPTS.items():
            chunk = pb.PrefillChunk(sequence_id=i, start=0, num_tokens=len(prompt))
            new = pb.NewSequence(sequence_id=i, token_ids=prompt, tier=TIERS[i], blocks=range(4 * i, 4 * i + 4))
            new.sampling.num_logprobs = -1
            self.run(pb.EXECUTION_MODE_GPU_ONLY, pb.SubBatch(prefills=[chunk]), new_sequences=[new])

    def run(self, mode: "pb.ExecutionMode", *sub_batches: pb.SubBatch, **changes: Any) -> dict[int, int]:
        """Tokens by sequence."""
        self._iteration += 1
        plan = pb.IterationPlan(epoch=1, iteration=self._iteration, mode=mode, sub_batches=sub_batches, **changes)
        result = self.fake._run(plan)
        assert result.error == pb.EXECUTION_ERROR_UNSPECIFIED
        return dict(zip(result.sequence_ids, result.token_ids, strict=True))

    def decouple(self, ids: tuple[int, ...], start: int, num: int, *batches: pb.SubBatch, **changes: Any) -> Any:
        step = pb.CohortStep(sequence_ids=ids, start_layer=start, num_layers=num)
        return self.run(pb.EXECUTION_MODE_DECOUPLED, *batches, cohort=step, **changes)


def test_a_cohort_in_parts_beside_a_batch() -> None:
    executor = Executor()
    batch = pb.SubBatch(gpu_decode_sequence_ids=[1])
    for step in range(1, 4):
        beside = {1: alphabet(PROMPTS[1], 2 * step - 1)}
        assert executor.decouple((3, 2), 0, 2, batch) == beside
        ended = executor.decouple((3, 2), 2, 1, batch)
        assert ended == {1: alphabet(PROMPTS[1], 2 * step), **{i: alphabet(PROMPTS[i], step) for i in (3, 2)}}
        assert list(ended) == [1, 3, 2]
    assert executor.decouple((2,), 0, 3) == {2: alphabet(PROMPTS[2], 4)}
    assert executor.fake.problems == []


DECODE_1, DECODE_2 = pb.SubBatch(gpu_decode_sequence_ids=[1]), pb.SubBatch(cpu_decode_sequence_ids=[2])


@pytest.mark.parametrize(
    ("arguments", "changes", "problem"),
    [
        (((2, 3), 0, 2), {}, "2 layers from 0 on, its step is at 1"),
        (((2, 3), 1, 3), {}, "3 layers from 1 on"),
        (((2, 3), 1, 0), {}, "0 layers from 1 on"),
        (((2,), 1, 2), {}, "[2] go on with the step of [2, 3]"),
        (((2, 3), 1, 2), {"new_blocks": [pb.NewBlocks(sequence_id=3, blocks=[0])]}, "sequence 3 changes"),
        (
            ((2, 3), 1, 2),
            {"swaps": [pb.Swap(sequence_id=2, target=pb.TIER_GPU, blocks=[0, 1])]},
            "sequence 2 changes",
        ),
        (((2, 3), 1, 2, DECODE_1, DECODE_1), {}, "EXECUTION_MODE_DECOUPLED: 2 sub-batches"),
        (((2, 3), 1, 2, DECODE_2), {}, "sequence 2 is in a sub-batch and in the cohort"),
    ],
)
def test_promises_broken_amid_a_step(arguments: tuple[Any, ...], changes: dict[str, Any], problem: str) -> None:
    executor = Executor()
    executor.decouple((2, 3), 0, 1)
    assert executor.fake.problems == []
    executor.decouple(*arguments, **changes)
    assert any(problem in found for found in executor.fake.problems), executor.fake.problems


@pytest.mark.parametrize(("ids", "problem"), [((), "[] begin"), ((2, 2), "[2, 2] begin"), ((1,), "cannot decode")])
def test_promises_broken_at_a_steps_beginning(ids: tuple[int, ...], problem: str) -> None:
    executor = Executor()
    executor.decouple(ids, 0, 1)
    assert any(problem in found for found in executor.fake.problems), executor.fake.problems


def test_a_mode_that_does_not_fit_its_plan() -> None:
    executor = Executor()
    executor.run(pb.EXECUTION_MODE_DECOUPLED, DECODE_1)
    executor.run(pb.EXECUTION_MODE_SAME_LAYER, DECODE_1, DECODE_2)
    executor.run(pb.EXECUTION_MODE_GPU_ONLY, DECODE_2)
    assert executor.fake.problems == [
        "EXECUTION_MODE_DECOUPLED, cohort: False",
        "EXECUTION_MODE_SAME_LAYER: 2 sub-batches",
        "EXECUTION_MODE_GPU_ONLY: a sub-batch has CPU decodes",
    ]
