"""Plans that contradict the state are refused before anything runs; those that do not leave the state they describe."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.gpu import BLOCK_TOKENS, Driver, load_decoder

from gpu_svc.limits import Limits
from svc_common.decoder.decoder import Decoder
from svc_common.model.store import ModelFiles
from svc_common.plan import (
    ExecutionError,
    IterationPlan,
    Mode,
    NewBlocks,
    NewSequence,
    PrefillChunk,
    Sampling,
    SubBatch,
    Swap,
    Tier,
)

MakeDriver = Callable[..., Driver]
PROMPT = list(range(10, 19))  # 9 tokens, 3 blocks


@pytest.fixture
def decoder(checkpoint: Callable[[str], ModelFiles]) -> Decoder:
    return load_decoder(checkpoint("llama"))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new(sequence_id: int, *blocks: int, prompt: list[int] = PROMPT, **options: Any) -> NewSequence:
    return NewSequence(sequence_id, ids(*prompt), options.pop("tier", Tier.GPU), ids(*blocks), **options)


def whole(sequence_id: int) -> SubBatch:
    return SubBatch(prefills=(PrefillChunk(sequence_id, 0, len(PROMPT)),))


INVALID: dict[str, tuple[str, tuple[SubBatch, ...], dict[str, Any]]] = {
    "unknown id released": ("sequence 9 is not known", (), {"released": (9,)}),
    "unknown id decoded": ("sequence 9 is not known", (SubBatch(gpu_decodes=(9,)),), {}),
    "known id again": ("known already", (), {"new_sequences": (new(1, 20),)}),
    "no tokens": ("has 0 tokens", (), {"new_sequences": (new(9, 20, prompt=[]),)}),
    "foreign token": ("outside the vocabulary", (), {"new_sequences": (new(9, 20, prompt=[257]),)}),
    "too long": ("600 tokens", (), {"new_sequences": (new(9, 20, prompt=[1] * 600),)}),
    "block out of range": ("blocks 30 to 30; there are 30", (), {"new_blocks": (NewBlocks(1, ids(30)),)}),
    "negative block": ("blocks -1 to 20", (), {"new_blocks": (NewBlocks(1, ids(20, -1)),)}),
    "block of another": ("owned already: [4]", (), {"new_blocks": (NewBlocks(1, ids(20, 4)),)}),
    "block twice": ("a gpu block twice", (), {"new_blocks": (NewBlocks(1, ids(20, 20)),)}),
    "host block without host": ("there are 0", (), {"new_sequences": (new(9, 0, tier=Tier.HOST),)}),
    "swap to where it is": ("on the gpu already", (), {"swaps": (Swap(1, Tier.GPU, ids(20, 21, 22)),)}),
    "swap into too few": ("moves 3 blocks into 2", (), {"swaps": (Swap(1, Tier.HOST, ids(0, 1)),)}),
    "decode before the prompt": ("before its prompt is computed", (SubBatch(gpu_decodes=(2,)),), {}),
    "decode on the wrong tier": ("on the host, where it is not", (SubBatch(cpu_decodes=(1,)),), {}),
    "chunk that skips": ("chunk 5 to 9, but 4 of 9", (SubBatch(prefills=(PrefillChunk(2, 5, 4),)),), {}),
    "chunk beyond the prompt": ("chunk 4 to 10", (SubBatch(prefills=(PrefillChunk(2, 4, 6),)),), {}),
    "chunk of a whole prompt": ("but 9 of 9", (SubBatch(prefills=(PrefillChunk(1, 9, 1),)),), {}),
    "empty chunk": ("chunk 4 to 4", (SubBatch(prefills=(PrefillChunk(2, 4, 0),)),), {}),
    "too few blocks": ("too few for 5", (SubBatch(prefills=(PrefillChunk(2, 4, 1),)),), {}),
    "sequence twice": ("sequence 1 appears twice", (SubBatch(gpu_decodes=(1, 1)),), {}),
    "GPU decode in the second": (
        "the second holds no GPU decodes",
        (SubBatch(prefills=(PrefillChunk(2, 4, 1),)), SubBatch(gpu_decodes=(1,))),
        {},
    ),
    "a gap between the parts of a prompt": (
        "chunk 6 to 7, but 5 of 9",
        (SubBatch(prefills=(PrefillChunk(2, 4, 1),)), SubBatch(prefills=(PrefillChunk(2, 6, 1),))),
        {"new_blocks": (NewBlocks(2, (5,)),)},
    ),
    "too many tokens": (
        "300 tokens in an iteration",
        (SubBatch(prefills=(PrefillChunk(9, 0, 300),)),),
        {"new_sequences": (new(9, *range(5, 30), prompt=[1] * 300),)},
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_plans_end_the_epoch(case: str, decoder: Decoder, make_driver: MakeDriver) -> None:
    """Sequence 1 has its prompt computed in blocks 0 to 3, sequence 2 four of nine tokens in block 4."""
    message, sub_batches, changes = INVALID[case]
    driver = make_driver(decoder, 30)
    driver.run(whole(1), new_sequences=(new(1, 0, 1, 2, 3),))
    driver.run(SubBatch(prefills=(PrefillChunk(2, 0, 4),)), new_sequences=(new(2, 4),))
    if case == "decode on the wrong tier":
        plan = IterationPlan(1, 3, Mode.ASYMMETRIC, sub_batches=sub_batches)
        result = driver.executor.run(plan)
    else:
        result = driver.try_run(*sub_batches, **changes)
    assert result.error is ExecutionError.INVALID_PLAN
    assert message in result.error_message
    assert result.tokens == ()
    assert driver.try_run().error is ExecutionError.STALE


def test_cpu_decodes_in_a_gpu_only_iteration_are_refused(decoder: Decoder, make_driver: MakeDriver) -> None:
    driver = make_driver(decoder)
    driver.run(whole(1), new_sequences=(new(1, 0, 1, 2),))
    plan = IterationPlan(1, 2, Mode.GPU_ONLY, sub_batches=(SubBatch(cpu_decodes=(1,)),))
    assert "a gpu_only iteration holds CPU decodes" in driver.executor.run(plan).error_message


def test_plans_come_in_order_and_of_this_epoch(decoder: Decoder, make_driver: MakeDriver) -> None:
    driver = make_driver(decoder)
    stale = driver.executor.run(IterationPlan(7, 1, Mode.GPU_ONLY))
    assert (stale.error, stale.error_message) == (ExecutionError.STALE, "epoch 7 is not open")
    driver.run()  # The stale plan changed nothing.
    skipped = driver.executor.run(IterationPlan(1, 3, Mode.GPU_ONLY))
    assert (skipped.error, skipped.error_message) == (ExecutionError.INVALID_PLAN, "iteration 3 follows 1")


def test_too_many_sequences(decoder: Decoder, make_driver: MakeDriver) -> None:
    driver = make_driver(decoder, limits=Limits(2, 64, 64))
    driver.run(new_sequences=(new(1), new(2)))
    driver.run(released=(2,), new_sequences=(new(3),))
    assert "one more than 2" in driver.try_run(new_sequences=(new(4),)).error_message


def test_a_sequence_may_not_outgrow_the_limit(decoder: Decoder, make_driver: MakeDriver) -> None:
    driver = make_driver(decoder, limits=Limits(4, 64, 10))
    driver.run(whole(1), new_sequences=(new(1, 0, 1, 2, 3),))
    driver.run(SubBatch(gpu_decodes=(1,)))
    assert "exceeds 10 tokens" in driver.try_run(SubBatch(gpu_decodes=(1,))).error_message


def test_status_follows_the_plans(decoder: Decoder, make_driver: MakeDriver) -> None:
    driver = make_driver(decoder, 30)
    driver.run(whole(1), new_sequences=(new(1, 0, 1, 2), new(2, 7)))
    driver.run(new_blocks=(NewBlocks(2, ids(8, 9)),))
    status = driver.executor.status()
    assert (status.epoch, status.last_iteration) == (1, 2)
    assert (status.num_sequences, status.gpu_blocks_used, status.host_blocks_used) == (2, 6, 0)
    block_bytes = 3 * 2 * 2 * BLOCK_TOKENS * 8 * 4
    assert status.gpu_kv_bytes == 30 * block_bytes
    # Rows of a matrix come in panels of 32; 257 tokens, 80 rows of q, k and v, 48 of the output, ...
    vocabulary = 2 * 288 * 48 + 48
    assert status.weight_bytes == 4 * (vocabulary + 3 * (48 * 2 + 96 * 48 + 64 * 48 + 160 * 48 + 64 * 80))
    driver.run(released=(1, 2))
    assert driver.executor.status().gpu_blocks_used == 0


def test_released_blocks_and_ids_serve_again(decoder: Decoder, make_driver: MakeDriver) -> None:
    """A recomputed sequence returns under its id, in blocks that fall free in the same plan, and goes on as it was."""
    sampling = Sampling(temperature=1.5, seed=77)
    driver = make_driver(decoder, 5)
    driver.run(whole(1), new_sequences=(new(1, 0, 1, 2, 3, 4, sampling=sampling),))
    for _ in range(6):
        driver.run(SubBatch(gpu_decodes=(1,)))
    expected = driver.tokens.pop(1)
    again = [*PROMPT, *expected[:3]]
    driver.run(
        SubBatch(prefills=(PrefillChunk(1, 0, 12),)),
        released=(1,),
        new_sequences=(new(1, 4, 3, 2, 1, 0, prompt=again, sampling=sampling, num_generated_tokens=3),),
    )
    for _ in range(3):
        driver.run(SubBatch(gpu_decodes=(1,)))
    assert driver.tokens[1] == expected[3:]


def test_samples_do_not_depend_on_neighbours(decoder: Decoder, make_driver: MakeDriver) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    alone, crowd = make_driver(decoder), make_driver(decoder)
    alone.prefill(1, PROMPT, sampling=sampling)
    for other in range(2, 8):
        crowd.prefill(other, PROMPT[:other], sampling=replace(sampling, seed=other))
    crowd.prefill(1, PROMPT, sampling=sampling)
    for _ in range(8):
        alone.run(SubBatch(gpu_decodes=(1,)))
        crowd.run(SubBatch(gpu_decodes=(4, 1, 7, 2)))
    assert crowd.tokens[1] == alone.tokens[1]
    assert len(set(alone.tokens[1])) > 1


def test_logprobs_come_with_the_tokens_that_asked(decoder: Decoder, make_driver: MakeDriver) -> None:
    driver = make_driver(decoder)
    driver.prefill(1, PROMPT, sampling=Sampling(num_logprobs=3))
    driver.prefill(2, PROMPT)
    result = driver.run(SubBatch(gpu_decodes=(2, 1)))
    assert list(result.logprobs) == [1]
    row = result.logprobs[1]
    assert row.top[0] == (dict(result.tokens)[1], row.chosen)
    assert len(row.top) == 3


def test_a_plan_may_do_nothing(decoder: Decoder, make_driver: MakeDriver) -> None:
    result = make_driver(decoder).run(SubBatch(), SubBatch())
    assert result.tokens == ()
    assert result.timings.head_ns == 0
    assert result.timings.total_ns > 0


def test_time_counts_from_when_a_plan_is_there_and_the_one_before_is_done(
    decoder: Decoder, make_driver: MakeDriver
) -> None:
    executor = make_driver(decoder).executor
    before_ns = time.perf_counter_ns()
    first, second, third = (
        executor.run(IterationPlan(1, number, Mode.GPU_ONLY), received_ns)
        for number, received_ns in ((1, before_ns), (2, before_ns), (3, None))
    )
    elapsed_ns = time.perf_counter_ns() - before_ns
    assert second.timings.idle_ns == 0  # It was there before the first one was done.
    assert third.timings.idle_ns > 0
    assert first.timings.total_ns + second.timings.total_ns + third.timings.total_ns <= elapsed_ns
