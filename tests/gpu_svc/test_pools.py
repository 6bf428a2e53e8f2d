"""Several cpu_attn_svc beside one executor: the same tokens in every mode, each sequence in a pool of its own."""

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gpu import Driver, load_decoder
from support.reference import Reference, Verdict

from svc_common.model.store import ModelFiles
from svc_common.plan import CohortStep, ExecutionError, Mode, NewBlocks, NewSequence, SubBatch, Swap, Tier
from svc_common.trace import TraceKind

MakeDriver = Callable[..., Driver]
GetFiles = Callable[[str], ModelFiles]
GetReference = Callable[[str], Reference]

PROMPTS = {i: [(i * 53 + j * 31 + j * j) % 257 for j in range(3 + 11 * i)] for i in range(1, 6)}
POOLS = {1: 0, 2: 1, 3: 0, 4: 1, 5: 1}
"""By sequence. The first pool has another size than the second."""


@pytest.fixture(scope="module")
def services(start_cpu_attention: Callable[..., Any]) -> tuple[Any, Any]:
    return start_cpu_attention(2 * 2**20), start_cpu_attention(4 * 2**20)


@pytest.fixture
def driver(checkpoint: GetFiles, make_driver: MakeDriver, services: Any) -> Driver:
    """All on the host, in turn in one pool and the other."""
    driver = make_driver(load_decoder(checkpoint("llama")), 60, services)
    for sequence_id, pool in POOLS.items():
        driver.prefill(sequence_id, PROMPTS[sequence_id], Tier.HOST, chunk_tokens=16, room_tokens=30, pool=pool)
    return driver


def assert_reference_tokens(reference: Reference, driver: Driver) -> None:
    verdict = Verdict()
    for sequence_id, prompt in PROMPTS.items():
        reference.judge(prompt, driver.tokens[sequence_id], verdict, str(sequence_id))
    assert not verdict.mismatches, str(verdict)


@pytest.mark.parametrize("mode", [Mode.ASYMMETRIC, Mode.SAME_LAYER, Mode.DECOUPLED])
def test_the_same_tokens_in_each_mode(mode: Mode, driver: Driver, reference: GetReference) -> None:
    """Named in an order that is not the pools', in which tokens come back all the same."""
    for _ in range(10):
        if mode is Mode.ASYMMETRIC:
            result = driver.run(SubBatch(cpu_decodes=(2, 1, 5)), SubBatch(cpu_decodes=(4, 3)))
            order = [2, 1, 5, 4, 3]
        elif mode is Mode.SAME_LAYER:
            result = driver.run(SubBatch(cpu_decodes=(5, 1, 4, 3, 2)), mode=mode)
            order = [5, 1, 4, 3, 2]
        else:
            order = [4, 3, 2, 1, 5]
            driver.run(cohort=CohortStep(tuple(order), 0, 1))
            result = driver.run(cohort=CohortStep(tuple(order), 1, 2))
        assert [sequence_id for sequence_id, _ in result.tokens] == order
    attended = [sum(len(PROMPTS[i]) + 10 for i, of in POOLS.items() if of == pool) for pool in (0, 1)]
    assert [work.attended_tokens for work in result.pool_work] == attended
    assert sum(work.attention_ns for work in result.pool_work) == result.timings.cpu_attention_ns
    assert all(work.attention_ns > 0 for work in result.pool_work)
    assert_reference_tokens(reference("llama"), driver)


def test_swaps_go_to_the_pool_that_owns_the_blocks(driver: Driver, reference: GetReference, services: Any) -> None:
    """In from both pools, and out again to the other one."""
    assert driver.executor._epoch is not None
    table = driver.executor._epoch.table
    used = list(table.pool_blocks_used)
    moves = tuple(Swap(i, Tier.GPU, driver.blocks(Tier.GPU, 90)) for i in (3, 4))
    driver.run(SubBatch(gpu_decodes=(3, 4), cpu_decodes=(5, 2, 1)), swaps=moves)
    assert [before - after for before, after in zip(used, table.pool_blocks_used, strict=True)] == [17, 20]
    moves = (
        Swap(3, Tier.HOST, driver.blocks(Tier.HOST, 90, pool=1)),
        Swap(4, Tier.HOST, driver.blocks(Tier.HOST, 90, pool=0)),
    )
    driver.run(SubBatch(cpu_decodes=(3, 4, 1)), SubBatch(cpu_decodes=(2, 5)), swaps=moves)
    for _ in range(4):
        driver.run(SubBatch(cpu_decodes=(3, 4, 1)), SubBatch(cpu_decodes=(2, 5)))
    assert_reference_tokens(reference("llama"), driver)


def test_a_trace_shows_each_service(driver: Driver) -> None:
    """The first pool has work of the first sub-batch only, the second of the second."""
    result = driver.run(SubBatch(cpu_decodes=(1, 3)), SubBatch(cpu_decodes=(5, 2, 4)), trace=True)
    trace = result.trace
    assert trace is not None
    own = {events.pool: list(trace.events(events)) for events in trace.cpu}
    attended = {pool: [event for event in own[pool] if event.kind is TraceKind.CPU_ATTEND] for pool in own}
    batches = {pool: {event.sub_batch for event in events} for pool, events in attended.items()}
    assert batches == {0: {0}, 1: {1}}
    for pool, events in attended.items():
        assert [event.layer for event in events] == [0, 1, 2]
        assert sum(event.duration_ns for event in events) == result.pool_work[pool].attention_ns
    alone = driver.run(SubBatch(cpu_decodes=(1, 3)), trace=True).trace
    assert alone is not None
    assert [events.pool for events in alone.cpu] == [0]


def test_blocks_of_two_pools_are_refused(driver: Driver) -> None:
    blocks = tuple(int(driver.blocks(Tier.HOST, 1, pool)[0]) for pool in (0, 1))
    new = NewSequence(9, np.arange(6, dtype="i4"), Tier.HOST, blocks)
    result = driver.try_run(SubBatch(), new_sequences=(new,))
    assert result.error is ExecutionError.INVALID_PLAN
    assert "sequence 9 gets host blocks of several pools" in result.error_message


def test_a_block_of_another_pool_is_refused(driver: Driver) -> None:
    result = driver.try_run(SubBatch(), new_blocks=(NewBlocks(1, (int(driver.blocks(Tier.HOST, 1, pool=1)[0]),)),))
    assert result.error is ExecutionError.INVALID_PLAN
    assert "sequence 1 gets host blocks of several pools" in result.error_message


def test_one_lost_service_ends_the_epoch(
    checkpoint: GetFiles, make_driver: MakeDriver, start_cpu_attention: Callable[..., Any], services: Any
) -> None:
    lost = start_cpu_attention(2 * 2**20)
    driver = make_driver(load_decoder(checkpoint("llama")), 60, (services[0], lost))
    driver.prefill(1, PROMPTS[1], Tier.HOST, pool=0)
    lost.process.send_signal(signal.SIGKILL)
    lost.process.wait()
    assert driver.try_run(SubBatch(cpu_decodes=(1,))).error is ExecutionError.CPU_ATTENTION_LOST


def test_a_second_pool_gets_a_factor(checkpoint: GetFiles, make_driver: MakeDriver, services: Any) -> None:
    tables = make_driver(load_decoder(checkpoint("llama")), 60, services).executor.profile()
    first, second = tables.cpu_pool_factors
    assert first == 1.0
    assert second > 0
    assert tables.cpu_decode
