"""Layers that are streamed yield the same bits as layers that lie on the device, in every way an iteration runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import LIMITS, VARIANTS, Driver, load_decoder, load_placed, load_torch_decoder

from gpu_svc.cpu_layers import CpuLayers
from gpu_svc.device_memory import DeviceMemory, DoesNotFitError
from gpu_svc.limits import Limits
from gpu_svc.link import Link
from gpu_svc.placed_decoder import PlacedDecoder
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.layer_file import LayerFile, LayerFileError
from svc_common.decoder.weights import tensors
from svc_common.model.store import ModelFiles
from svc_common.plan import CohortStep, NewSequence, PrefillChunk, SubBatch, Swap, Tier
from svc_common.policy import ExecutionPolicy
from svc_common.trace import TraceKind
from svc_common.trace_wire import trace_from_message, trace_to_message

MakeDriver = Callable[..., Driver]
GetFiles = Callable[[str], ModelFiles]
PROMPTS = {i: [(i * 53 + j * 31 + j * j) % 257 for j in range(3 + 11 * i)] for i in range(1, 5)}


@pytest.fixture
def placed(checkpoint: GetFiles, tmp_path: Path) -> Iterator[Callable[..., PlacedDecoder]]:
    """Decoders over a layer file; their threads end with the test."""
    made: list[PlacedDecoder] = []

    def make(variant: str = "llama-deep", **options: Any) -> PlacedDecoder:
        made.append(load_placed(checkpoint(variant), tmp_path, **options))
        return made[-1]

    yield make
    for decoder in made:
        decoder.close()


def record_logits(decoder: Decoder) -> list[torch.Tensor]:
    """Those of all iterations from now on."""
    seen: list[torch.Tensor] = []
    compute = decoder.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        result = compute(hidden)
        seen.append(result.clone())
        return result

    decoder.logits = logits  # type: ignore[method-assign]
    return seen


def on_the_gpu(driver: Driver) -> None:
    for sequence_id, prompt in PROMPTS.items():
        driver.prefill(sequence_id, prompt, chunk_tokens=7 + sequence_id, room_tokens=8)
    for _ in range(4):
        driver.run(SubBatch(gpu_decodes=tuple(PROMPTS)))


def on_both_tiers(driver: Driver) -> None:
    """Prompts and decodes in one and in two sub-batches, a swap, and a cohort alone and beside a batch."""
    for sequence_id, prompt in PROMPTS.items():
        tier = Tier.HOST if sequence_id > 2 else Tier.GPU
        driver.prefill(sequence_id, prompt, tier, chunk_tokens=16, room_tokens=30)
    new = NewSequence(5, np.array(PROMPTS[4], "i4"), Tier.HOST, driver.blocks(Tier.HOST, 70))
    driver.run(
        SubBatch(prefills=(PrefillChunk(5, 0, 20),), gpu_decodes=(1, 2), cpu_decodes=(3,)),
        SubBatch(prefills=(PrefillChunk(5, 20, 27),), cpu_decodes=(4,)),
        new_sequences=(new,),
    )
    for _ in range(3):
        driver.run(SubBatch(gpu_decodes=(1, 2), cpu_decodes=(5,)), SubBatch(cpu_decodes=(3, 4)))
        driver.run(SubBatch(gpu_decodes=(2,), cpu_decodes=(3,)))
    driver.run(SubBatch(gpu_decodes=(2,)), swaps=(Swap(1, Tier.HOST, driver.blocks(Tier.HOST, 60)),))
    for layers in ((3, 4), (7,), (1, 1, 1, 4)):
        for part, num_layers in enumerate(layers):
            driver.run(SubBatch(gpu_decodes=(2,)), cohort=CohortStep((3, 4), sum(layers[:part]), num_layers))
    driver.run(cohort=CohortStep((1, 3, 5), 0, 2))
    driver.run(cohort=CohortStep((1, 3, 5), 2, 5))


def results(
    scenario: Callable[[Driver], None], decoder: Decoder, make_driver: MakeDriver, *arguments: Any, **options: Any
) -> tuple[dict[int, list[int]], torch.Tensor, Driver]:
    logits = record_logits(decoder)
    driver = make_driver(decoder, 80, *arguments, **options)
    scenario(driver)
    return driver.tokens, torch.cat(logits), driver


@pytest.mark.parametrize("resident", range(8))
def test_any_number_of_resident_layers_gives_the_same_bits(
    resident: int,
    checkpoint: GetFiles,
    placed: Callable[..., PlacedDecoder],
    make_driver: MakeDriver,
    cpu_attention: Any,
) -> None:
    tokens, logits, driver = results(on_both_tiers, load_decoder(checkpoint("llama-deep")), make_driver, cpu_attention)
    driver.executor.close_epoch()
    policy = ExecutionPolicy(resident)
    streamed = results(on_both_tiers, placed(), make_driver, cpu_attention, policy=policy)
    assert streamed[0] == tokens
    assert torch.equal(streamed[1], logits)
    came = [result.timings.weight_bytes for result in streamed[2].results]
    waited = [result.timings.weight_wait_ns for result in streamed[2].results]
    if resident == 7:
        assert came == waited == [0] * len(came)
    else:
        assert sum(came) > 0
        assert 0 < sum(waited) < sum(result.timings.total_ns for result in streamed[2].results)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_can_be_streamed(
    variant: str, checkpoint: GetFiles, placed: Callable[..., PlacedDecoder], make_driver: MakeDriver
) -> None:
    tokens, logits, _ = results(on_the_gpu, load_decoder(checkpoint(variant)), make_driver)
    streamed = results(on_the_gpu, placed(variant), make_driver, policy=ExecutionPolicy(0))
    assert streamed[0] == tokens
    assert torch.equal(streamed[1], logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_unpacks_the_weights_it_would_load(
    variant: str, dtype: torch.dtype, checkpoint: GetFiles, placed: Callable[..., PlacedDecoder]
) -> None:
    """Bit for bit; the decoder of a GPU, here on the CPU."""
    own = load_torch_decoder(checkpoint(variant), dtype).weights
    decoder = placed(variant, dtype=dtype, torch_layers=True)
    decoder.place(range(0), decoder.spec.num_layers)
    unpacked = decoder._inner.weights  # type: ignore[attr-defined]
    for ours, theirs in zip(tensors(own), tensors(unpacked), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("variant", ["llama-deep", "gemma3", "qwen2-moe-dense"])
def test_torch_computes_with_streamed_layers(
    variant: str, checkpoint: GetFiles, placed: Callable[..., PlacedDecoder], make_driver: MakeDriver
) -> None:
    tokens, logits, _ = results(on_the_gpu, load_torch_decoder(checkpoint(variant)), make_driver)
    decoder = placed(variant, torch_layers=True)
    executor = make_driver(decoder, 80).executor
    seen = record_logits(decoder)
    for epoch, resident in enumerate((0, decoder.spec.num_layers, 1), start=2):
        driver = Driver(executor, epoch=epoch, policy=ExecutionPolicy(resident))
        if epoch == 2:
            executor.profile()
        seen.clear()
        on_the_gpu(driver)
        assert driver.tokens == tokens
        assert torch.equal(torch.cat(seen), logits)


def test_each_iteration_brings_the_streamed_layers_once(
    placed: Callable[..., PlacedDecoder], make_driver: MakeDriver
) -> None:
    """Two of them lie in the buffers when an iteration ends, fetched for the next."""
    decoder = placed()
    driver = make_driver(decoder, policy=ExecutionPolicy(2))
    on_the_gpu(driver)
    decoder.close()  # After the last copy.
    num_iterations = len(driver.results)
    layer_bytes = decoder.memory.layer_bytes[0]
    assert decoder.memory.streamed_bytes(range(5)) == 5 * layer_bytes
    total = decoder.traffic.num_bytes // layer_bytes
    assert 5 * num_iterations <= total <= 5 * num_iterations + 2


def test_two_streamed_layers_come_once_and_stay(placed: Callable[..., PlacedDecoder], make_driver: MakeDriver) -> None:
    decoder = placed()
    driver = make_driver(decoder, policy=ExecutionPolicy(5))
    on_the_gpu(driver)
    assert sum(result.timings.weight_bytes for result in driver.results) <= 2 * decoder.memory.layer_bytes[0]
    assert decoder.traffic.num_bytes == 2 * decoder.memory.layer_bytes[0]
    assert driver.executor.streamed_bytes == 0


def test_the_number_of_resident_layers_may_change_at_a_new_epoch(
    checkpoint: GetFiles, placed: Callable[..., PlacedDecoder], make_driver: MakeDriver
) -> None:
    tokens, logits, _ = results(on_the_gpu, load_decoder(checkpoint("llama-deep")), make_driver)
    decoder = placed()
    seen = record_logits(decoder)
    executor = make_driver(decoder, 80).executor
    memory = decoder.memory
    for epoch, resident in enumerate((0, 7, 3, 5, 1), start=2):
        seen.clear()
        driver = Driver(executor, epoch=epoch, policy=ExecutionPolicy(resident))
        assert executor.status().resident_layers == resident
        assert executor.status().weight_bytes == memory.weight_bytes(resident) == decoder.weight_bytes
        on_the_gpu(driver)
        assert driver.tokens == tokens
        assert torch.equal(torch.cat(seen), logits)


def test_without_a_policy_as_many_layers_as_fit_are_resident(
    placed: Callable[..., PlacedDecoder], make_driver: MakeDriver
) -> None:
    memory = placed().memory
    layer, other = memory.layer_bytes[0], memory.other_bytes
    for num_bytes, resident in ((other + 7 * layer, 7), (other + 7 * layer - 1, 4), (other + 2 * layer, 0)):
        decoder = placed(memory_bytes=num_bytes)
        assert make_driver(decoder).executor.status().resident_layers == resident
        assert decoder.weight_bytes == other + resident * layer


def test_what_does_not_fit_is_refused_with_the_numbers(
    placed: Callable[..., PlacedDecoder], make_driver: MakeDriver
) -> None:
    memory = placed().memory
    layer, other = memory.layer_bytes[0], memory.other_bytes
    decoder = placed(memory_bytes=other + 6 * layer)
    make_driver(decoder, policy=ExecutionPolicy(4))
    text = (
        f"5 of 7 layers with embedding and head take {other + 5 * layer} bytes, buffers for the others {2 * layer}, "
        "graphs 0, activations of the largest batch 0, KV 0, 0 are kept free: "
        f"more than the {other + 6 * layer} bytes of the device; see gpu.memory_bytes, gpu.kv_bytes, "
    )
    with pytest.raises(DoesNotFitError, match=text):
        make_driver(decoder, policy=ExecutionPolicy(5))
    with pytest.raises(DoesNotFitError, match="0 of 7 layers"):
        make_driver(placed(memory_bytes=other + 2 * layer - 1))


def test_a_decoder_without_a_layer_file_keeps_all_layers(checkpoint: GetFiles, make_driver: MakeDriver) -> None:
    decoder = load_decoder(checkpoint("llama"))
    make_driver(decoder, policy=ExecutionPolicy(3))
    with pytest.raises(DoesNotFitError, match="keeps all layers on its device"):
        make_driver(decoder, policy=ExecutionPolicy(2))


def test_operations_are_measured_without_waiting_for_weights(
    placed: Callable[..., PlacedDecoder], make_driver: MakeDriver
) -> None:
    """Nor are weights brought for it; streaming then goes on as if nothing had been measured."""
    decoder = placed(link_bytes_per_s=20_000_000)
    driver = make_driver(decoder, policy=ExecutionPolicy(0), limits=Limits(4, 64, 64))
    before = decoder.traffic
    tables = driver.executor.profile()
    assert decoder.traffic == before
    assert tables.link_bytes_per_s > 0
    on_the_gpu(driver)
    assert driver.results[-1].timings.weight_bytes > 0


def test_a_trace_shows_layers_on_the_link(placed: Callable[..., PlacedDecoder], make_driver: MakeDriver) -> None:
    driver = make_driver(placed(link_bytes_per_s=10_000_000), policy=ExecutionPolicy(3))
    on_the_gpu(driver)
    trace = driver.run(SubBatch(gpu_decodes=(1, 2)), trace=True).trace
    assert trace is not None
    came = list(trace.events(trace.link))
    assert {event.kind for event in came} == {TraceKind.WEIGHT_COPY}
    assert {2, 3} <= {event.layer for event in came} <= {0, 1, 2, 3}
    assert all(trace.start_ns <= event.start_ns <= event.end_ns <= trace.end_ns for event in came)
    waits = [event for event in trace.events(trace.gpu) if event.kind is TraceKind.WEIGHT_WAIT]
    assert [event.layer for event in waits] == [0, 1, 2, 3]
    assert trace_from_message(trace_to_message(trace)) == trace


def test_layers_stay_where_they_are_when_no_file_can_be_had(checkpoint: GetFiles, make_driver: MakeDriver) -> None:
    def open_file() -> LayerFile:
        raise LayerFileError("the disk is full")

    own = load_decoder(checkpoint("llama-deep"))
    assert isinstance(own, CpuDecoder)
    memory = DeviceMemory(2**40, own.layer_bytes, own.vocabulary_bytes, 0)
    executor = make_driver(PlacedDecoder(CpuLayers(own, open_file, Link()), memory), 80).executor
    with pytest.raises(LayerFileError, match="the disk is full"):
        executor.open_epoch(2, LIMITS, None, ExecutionPolicy(3))
    driver = Driver(executor, epoch=3)
    assert executor.status().resident_layers == memory.num_layers
    on_the_gpu(driver)
    assert set(map(len, driver.tokens.values())) == {5}
