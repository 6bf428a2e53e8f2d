"""A device that rings, waits and swaps by itself, played on the CPU beside the real service: the same tokens, and every
way in which the other side can fail it.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import Driver, load_decoder
from support.reference import Reference, Verdict
from support.streams import LateQueue, Sides

from gpu_svc.cuda.swaps import LayeredSwaps
from gpu_svc.kv_layout import KvBlocks
from gpu_svc.kv_swap import BlockMoves
from svc_common.model.store import ModelFiles
from svc_common.plan import CohortStep, ExecutionError, IterationResult, Mode, SubBatch, Swap, Tier

MakeDriver = Callable[..., Driver]
GetFiles = Callable[[str], ModelFiles]
GetReference = Callable[[str], Reference]

PROMPTS = {i: [(i * 53 + j * 31 + j * j) % 257 for j in range(3 + 11 * i)] for i in range(1, 6)}
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def services(start_cpu_attention: Callable[..., Any]) -> tuple[Any, Any]:
    return start_cpu_attention(2 * 2**20), start_cpu_attention(4 * 2**20)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Sides:
    sides = Sides()
    monkeypatch.setattr("gpu_svc.cpu_attention_client._device_side", sides.make)
    return sides


def host_driver(checkpoint: GetFiles, make_driver: MakeDriver, services: Any, **options: Any) -> Driver:
    """All on the host, in turn in one pool and the other where there are two."""
    driver = make_driver(load_decoder(checkpoint("llama")), 60, services, **options)
    assert driver.host is not None
    for sequence_id, prompt in PROMPTS.items():
        pool = sequence_id % len(driver.host.pools)
        driver.prefill(sequence_id, prompt, Tier.HOST, chunk_tokens=16, room_tokens=30, pool=pool)
    return driver


def assert_reference_tokens(reference: Reference, driver: Driver) -> None:
    verdict = Verdict()
    for sequence_id, prompt in PROMPTS.items():
        reference.judge(prompt, driver.tokens[sequence_id], verdict, str(sequence_id))
    assert not verdict.mismatches, str(verdict)


@pytest.mark.parametrize("num_services", [1, 2])
@pytest.mark.parametrize("mode", [Mode.ASYMMETRIC, Mode.SAME_LAYER, Mode.DECOUPLED])
def test_the_same_tokens_in_each_mode(
    mode: Mode,
    num_services: int,
    checkpoint: GetFiles,
    make_driver: MakeDriver,
    services: Any,
    sides: Sides,
    reference: GetReference,
) -> None:
    driver = host_driver(checkpoint, make_driver, services[2 - num_services :])
    assert driver.host is not None
    assert driver.host.uses_stream_doorbells
    swaps = tuple(Swap(i, Tier.GPU, driver.blocks(Tier.GPU, 90)) for i in (3, 4))
    driver.run(SubBatch(gpu_decodes=(3, 4), cpu_decodes=(5, 2, 1)), swaps=swaps)
    result: IterationResult
    for _ in range(5):
        if mode is Mode.ASYMMETRIC:
            result = driver.run(SubBatch(gpu_decodes=(3,), cpu_decodes=(2, 1)), SubBatch(cpu_decodes=(5,)))
            driver.run(SubBatch(gpu_decodes=(4,)))
        elif mode is Mode.SAME_LAYER:
            result = driver.run(SubBatch(gpu_decodes=(3, 4), cpu_decodes=(5, 1, 2)), mode=mode)
        else:
            driver.run(SubBatch(gpu_decodes=(3,)), cohort=CohortStep((2, 1, 5), 0, 1))
            result = driver.run(SubBatch(gpu_decodes=(4,)), cohort=CohortStep((2, 1, 5), 1, 2))
    assert result.timings.cpu_wait_ns > 0
    assert result.timings.cpu_attention_ns > 0
    for operations in sides.operations:
        assert {value for _, value in operations.sent} == set(range(1, NUM_LAYERS + 1))  # Again in each iteration.
    assert_reference_tokens(reference("llama"), driver)
    driver.executor.close_epoch()
    assert sides.num_unpinned == num_services


def test_swaps_beside_the_layers_change_no_token(
    checkpoint: GetFiles, make_driver: MakeDriver, services: Any, sides: Sides, reference: GetReference
) -> None:
    """Both ways at once, into blocks that are left in the same iteration, and to another pool; copies come late."""
    driver = host_driver(checkpoint, make_driver, services)
    in_both = SubBatch(cpu_decodes=(2,))
    back = tuple(Swap(i, Tier.GPU, driver.blocks(Tier.GPU, 90)) for i in (3, 4))
    driver.run(SubBatch(gpu_decodes=(3, 4), cpu_decodes=(5, 1)), in_both, swaps=back)
    assert driver.executor._epoch is not None
    table = driver.executor._epoch.table
    left = [int(block) for block in table.block_tables[table.slot_of[3]][:20]]
    out = Swap(3, Tier.HOST, driver.blocks(Tier.HOST, 90, pool=0))
    back = (out, Swap(5, Tier.GPU, np.array([*left, *driver.blocks(Tier.GPU, 13)], "i4")))
    driver.run(SubBatch(gpu_decodes=(4, 5), cpu_decodes=(3, 1)), in_both, swaps=back)
    out = Swap(5, Tier.HOST, driver.blocks(Tier.HOST, 93, pool=1))
    back = (out, Swap(3, Tier.GPU, np.array([*reversed(left), *driver.blocks(Tier.GPU, 13)], "i4")))
    driver.run(SubBatch(gpu_decodes=(3, 4), cpu_decodes=(1, 5)), in_both, swaps=back)
    driver.run(SubBatch(gpu_decodes=(3, 4), cpu_decodes=(1, 5)), in_both)
    assert_reference_tokens(reference("llama"), driver)


def test_the_stream_is_let_go_where_no_answer_comes(
    checkpoint: GetFiles, make_driver: MakeDriver, start_cpu_attention: Callable[..., Any], monkeypatch: Any
) -> None:
    """First the service stands still for longer than it may, then it is killed while the stream waits."""
    sides = Sides(answer_timeout_s=0.2)
    monkeypatch.setattr("gpu_svc.cpu_attention_client._device_side", sides.make)
    service = start_cpu_attention(4 * 2**20)
    driver = host_driver(checkpoint, make_driver, service)
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        result = driver.try_run(SubBatch(cpu_decodes=(1, 2)))
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    assert result.error is ExecutionError.CPU_ATTENTION_LOST
    assert "no answer from the CPU within 0.2 s" in result.error_message
    driver = host_driver(checkpoint, make_driver, service)
    sides.on_wait = lambda: service.kill() if service.process.poll() is None else None
    result = driver.try_run(SubBatch(cpu_decodes=(1, 2)))
    assert result.error is ExecutionError.CPU_ATTENTION_LOST
    assert "the CPU attention service is gone" in result.error_message
    assert sides.num_unpinned == 2


def test_a_refused_iteration_says_why(
    checkpoint: GetFiles, make_driver: MakeDriver, services: Any, sides: Sides
) -> None:
    driver = host_driver(checkpoint, make_driver, services[1])
    assert driver.executor._epoch is not None
    table = driver.executor._epoch.table
    table.block_tables[table.slot_of[2], 0] = 10**6
    result = driver.try_run(SubBatch(cpu_decodes=(1, 2)))
    assert result.error is ExecutionError.CPU_ATTENTION_LOST
    assert "was refused" in result.error_message
    assert "block 1000000" in result.error_message


def test_the_guard_ends_with_its_pool(
    checkpoint: GetFiles, make_driver: MakeDriver, services: Any, sides: Sides
) -> None:
    driver = host_driver(checkpoint, make_driver, services[1])
    assert "device-guard" in {thread.name for thread in threading.enumerate()}
    driver.executor.close_epoch()
    assert "device-guard" not in {thread.name for thread in threading.enumerate()}


def test_a_pool_is_given_up_where_its_epoch_cannot_be_opened(
    checkpoint: GetFiles, make_driver: MakeDriver, services: Any, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the device has no memory left for the cache."""

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gpu_svc.executor.GpuKvCache", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        make_driver(load_decoder(checkpoint("llama")), 60, services[1])
    assert sides.num_unpinned == 1
    assert "device-guard" not in {thread.name for thread in threading.enumerate()}


def test_operations_are_measured_as_they_run(
    checkpoint: GetFiles, make_driver: MakeDriver, services: Any, sides: Sides
) -> None:
    tables = make_driver(load_decoder(checkpoint("llama")), 60, services[1]).executor.profile()
    assert all(seconds > 0 for *_, seconds in tables.cpu_decode)
    assert all(seconds == 0 for _, seconds in tables.cpu_copy)
    assert tables.cpu_signal_s > 0
    assert tables.swap_bytes_per_s > 0


def test_a_layer_waits_for_no_later_one() -> None:
    """Ten layers in eight groups' worth of pairs; block 1 leaves, block 0 of the host takes its place."""
    gpu, host = (KvBlocks(torch.randn(10, 3, 2, 1, 8)) for _ in range(2))
    before = gpu.elements.clone(), host.elements.clone()
    one = np.array([8], np.int32)
    out = [(host, BlockMoves(np.array([1], np.int32), np.array([2], np.int32), one))]
    back = [(host, BlockMoves(np.array([0], np.int32), np.array([1], np.int32), one))]
    swaps = LayeredSwaps(LateQueue(), LateQueue())
    swaps.swap(gpu, out, back, head_dim=4)
    torch.testing.assert_close(gpu.elements, before[0])
    swaps.await_layer(3)
    for layer in range(10):
        moved = layer < 4
        assert torch.equal(host.elements[layer, 2], (before[0][layer, 1] if moved else before[1][layer, 2]))
        assert torch.equal(gpu.elements[layer, 1], (before[1][layer, 0] if moved else before[0][layer, 1]))
    swaps.settle()
    assert torch.equal(host.elements[:, 2], before[0][:, 1])
    assert torch.equal(gpu.elements[:, 1], before[1][:, 0])
    assert torch.equal(gpu.elements[:, ::2], before[0][:, ::2])
