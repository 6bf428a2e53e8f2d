"""The same tokens whichever processor attends, whichever tier holds the KV; a real cpu_attn_svc beside the executor."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import BLOCK_TOKENS, Driver, load_decoder, load_torch_decoder
from support.reference import Reference, Verdict

from svc_common.model.store import ModelFiles
from svc_common.plan import ExecutionError, NewSequence, PrefillChunk, SubBatch, Swap, Tier

MakeDriver = Callable[..., Driver]
GetFiles = Callable[[str], ModelFiles]
GetReference = Callable[[str], Reference]

PROMPTS = {i: [(i * 53 + j * 31 + j * j) % 257 for j in range(3 + 11 * i)] for i in range(1, 7)}
HOST_VARIANTS = ("llama", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "opt", "qwen2-moe")


def assert_reference_tokens(reference: Reference, driver: Driver, prompts: dict[int, list[int]] = PROMPTS) -> None:
    verdict = Verdict()
    for sequence_id, prompt in prompts.items():
        reference.judge(prompt, driver.tokens[sequence_id], verdict, str(sequence_id))
    assert not verdict.mismatches, str(verdict)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("variant", HOST_VARIANTS)
def test_everything_on_the_host(
    variant: str, checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """No GPU block at all: prompts in odd chunks and decodes run over the host pool alone."""
    driver = make_driver(load_decoder(checkpoint(variant)), 0, cpu_attention)
    for sequence_id, prompt in PROMPTS.items():
        driver.prefill(sequence_id, prompt, Tier.HOST, chunk_tokens=5 + 2 * sequence_id, room_tokens=20)
    for _ in range(12):
        driver.run(SubBatch(cpu_decodes=tuple(PROMPTS)))
    last = driver.results[-1]
    assert last.cpu_attended_tokens == sum(len(prompt) + 12 for prompt in PROMPTS.values())
    assert last.gpu_attended_tokens == 0
    assert last.timings.cpu_attention_ns > 0
    assert 0 < last.timings.cpu_wait_ns < last.timings.total_ns
    swapped_out = sum(result.swapped_out_bytes for result in driver.results)
    assert swapped_out == sum(map(len, PROMPTS.values())) * driver.executor.kv_shape.host_token_bytes
    assert_reference_tokens(reference(variant), driver)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("variant", HOST_VARIANTS)
def test_two_sub_batches(
    variant: str, checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Prefills, GPU decodes and CPU decodes in the first sub-batch, CPU decodes in the second."""
    driver = make_driver(load_decoder(checkpoint(variant)), 60, cpu_attention)
    tiers = {1: Tier.GPU, 2: Tier.HOST, 3: Tier.HOST, 4: Tier.GPU}
    for sequence_id, tier in tiers.items():
        driver.prefill(sequence_id, PROMPTS[sequence_id], tier, chunk_tokens=16, room_tokens=20)
    chunks = {5: 9, 6: 13}
    new = tuple(
        NewSequence(i, np.array(PROMPTS[i], "i4"), tier, driver.blocks(tier, len(PROMPTS[i]) + 20))
        for i, tier in ((5, Tier.HOST), (6, Tier.GPU))
    )
    for step in range(6):
        prefills = tuple(
            PrefillChunk(i, step * size, min(size, len(PROMPTS[i]) - step * size))
            for i, size in chunks.items()
            if step * size < len(PROMPTS[i])
        )
        result = driver.run(
            SubBatch(prefills, gpu_decodes=(1, 4), cpu_decodes=(3,)),
            SubBatch(cpu_decodes=(2,)),
            new_sequences=() if step else new,
        )
        done = [
            chunk.sequence_id for chunk in prefills if chunk.start + chunk.num_tokens == len(PROMPTS[chunk.sequence_id])
        ]
        assert [sequence_id for sequence_id, _ in result.tokens] == [*done, 1, 4, 3, 2]
    driver.run(SubBatch(prefills=(PrefillChunk(5, 54, 4),)))
    for _ in range(6):
        driver.run(SubBatch(gpu_decodes=(6, 1), cpu_decodes=(5, 2)), SubBatch(cpu_decodes=(3,)))
        driver.run(SubBatch(), SubBatch(cpu_decodes=(2, 5)))
    assert_reference_tokens(reference(variant), driver)


@pytest.mark.parametrize("variant", HOST_VARIANTS)
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])
def test_a_prompt_goes_on_from_the_first_sub_batch_to_the_second(
    variant: str, tier: Tier, checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Cut twice in each iteration, at no block's edge, beside CPU decodes in both sub-batches."""
    driver = make_driver(load_decoder(checkpoint(variant)), 60, cpu_attention)
    driver.prefill(1, PROMPTS[1], Tier.HOST, chunk_tokens=16, room_tokens=20)
    driver.prefill(2, PROMPTS[2], Tier.HOST, chunk_tokens=16, room_tokens=20)
    prompt = PROMPTS[6]  # 69 tokens
    new = NewSequence(6, np.array(prompt, "i4"), tier, driver.blocks(tier, len(prompt) + 20))
    for start, middle, end in ((0, 13, 30), (30, 37, 69)):
        result = driver.run(
            SubBatch(prefills=(PrefillChunk(6, start, middle - start),), cpu_decodes=(1,)),
            SubBatch(prefills=(PrefillChunk(6, middle, end - middle),), cpu_decodes=(2,)),
            new_sequences=() if start else (new,),
        )
    assert [sequence_id for sequence_id, _ in result.tokens] == [1, 6, 2]
    decodes = {"gpu_decodes": (6,)} if tier is Tier.GPU else {"cpu_decodes": (6,)}
    for _ in range(6):
        driver.run(SubBatch(**decodes), SubBatch(cpu_decodes=(1, 2)))
    assert_reference_tokens(reference(variant), driver, {i: PROMPTS[i] for i in (1, 2, 6)})


def test_swaps_there_and_back(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Blocks that one sequence leaves on the GPU are taken by another in the same plan."""
    driver = make_driver(load_decoder(checkpoint("llama")), 24, cpu_attention)
    driver.prefill(1, PROMPTS[1], room_tokens=33)  # 12 of the 24 blocks
    driver.prefill(2, PROMPTS[2], room_tokens=22)  # 12 more
    for _ in range(3):
        driver.run(SubBatch(gpu_decodes=(1, 2)))
    gpu_blocks = driver.executor._epoch.table.block_tables  # type: ignore[union-attr]
    slot = driver.executor._epoch.table.slot_of[1]  # type: ignore[union-attr]
    left = gpu_blocks[slot, :12].copy()
    out = driver.run(
        SubBatch(prefills=(PrefillChunk(3, 0, 36),), gpu_decodes=(2,), cpu_decodes=(1,)),
        swaps=(Swap(1, Tier.HOST, driver.blocks(Tier.HOST, 47)),),
        new_sequences=(NewSequence(3, np.array(PROMPTS[3], "i4"), Tier.GPU, left[::-1].copy()),),
    )
    filled = -(-(len(PROMPTS[1]) + 3) // BLOCK_TOKENS)
    assert out.swapped_out_bytes == filled * driver.executor.kv_shape.block_bytes
    for _ in range(3):
        driver.run(SubBatch(gpu_decodes=(3,), cpu_decodes=(1,)), SubBatch())
    # 2 leaves the GPU and 1 returns to where 2 was, at once.
    table = driver.executor._epoch.table  # type: ignore[union-attr]
    left = table.block_tables[table.slot_of[2], :12].copy()
    back = driver.run(
        SubBatch(gpu_decodes=(1, 3)),
        SubBatch(cpu_decodes=(2,)),
        swaps=(Swap(1, Tier.GPU, left), Swap(2, Tier.HOST, driver.blocks(Tier.HOST, 47))),
    )
    assert back.swapped_in_bytes == -(-(len(PROMPTS[1]) + 7) // BLOCK_TOKENS) * driver.executor.kv_shape.block_bytes
    for _ in range(4):
        driver.run(SubBatch(gpu_decodes=(1, 3)), SubBatch(cpu_decodes=(2,)))
    assert_reference_tokens(reference("llama"), driver, {i: PROMPTS[i] for i in (1, 2, 3)})


def test_a_swap_amid_a_prompt(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    driver = make_driver(load_decoder(checkpoint("qwen2")), 40, cpu_attention)
    prompt = PROMPTS[6]
    new = NewSequence(6, np.array(prompt, "i4"), Tier.GPU, driver.blocks(Tier.GPU, 80))
    driver.run(SubBatch(prefills=(PrefillChunk(6, 0, 21),)), new_sequences=(new,))
    to_host, to_gpu = (Swap(6, tier, driver.blocks(tier, 80)) for tier in (Tier.HOST, Tier.GPU))
    driver.run(SubBatch(prefills=(PrefillChunk(6, 21, 18),)), swaps=(to_host,))
    driver.run(SubBatch(prefills=(PrefillChunk(6, 39, 30),)), swaps=(to_gpu,))
    driver.run(SubBatch(gpu_decodes=(6,)))
    assert_reference_tokens(reference("qwen2"), driver, {6: prompt})


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_narrow_kv_gives_the_same_tokens_on_both_tiers(
    kv_dtype: torch.dtype, checkpoint: GetFiles, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """fp32 compute over 16-bit KV: tiers and cuts of a prompt round alike."""
    decoder = load_decoder(checkpoint("llama"))
    tokens = []
    for tier, chunk_tokens in ((Tier.GPU, 50), (Tier.GPU, 7), (Tier.HOST, 50), (Tier.HOST, 9)):
        driver = make_driver(decoder, 60, cpu_attention, kv_dtype=kv_dtype)
        driver.prefill(4, PROMPTS[4], tier, chunk_tokens, room_tokens=20)
        for _ in range(10):
            driver.run(SubBatch(gpu_decodes=(4,)) if tier is Tier.GPU else SubBatch(cpu_decodes=(4,)))
        tokens.append(driver.tokens[4])
        driver.executor.close_epoch()
    assert tokens == tokens[:1] * 4


def test_sixteen_bit_compute_runs_over_the_plane(
    checkpoint: GetFiles, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """bf16 in the exchange slots and in the pool; logits of the two tiers' paths agree within bf16."""
    decoder = load_torch_decoder(checkpoint("llama"), torch.bfloat16)
    driver = make_driver(decoder, 60, cpu_attention)
    driver.prefill(1, PROMPTS[1], Tier.GPU)
    driver.prefill(2, PROMPTS[1], Tier.HOST)
    assert driver.tokens[1] == driver.tokens[2]
    driver.run(SubBatch(gpu_decodes=(1,), cpu_decodes=(2,)))
    epoch = driver.executor._epoch
    assert epoch is not None
    assert epoch.host is not None
    gpu, host = (epoch.table.block_tables[epoch.table.slot_of[i], 0] for i in (1, 2))
    torch.testing.assert_close(epoch.cache.blocks[:, gpu], epoch.host.pool(0).blocks.elements[:, host], rtol=0, atol=0)


def test_a_killed_service_ends_the_epoch(
    checkpoint: GetFiles, make_driver: MakeDriver, start_cpu_attention: Callable[[], Any]
) -> None:
    service = start_cpu_attention()
    driver = make_driver(load_decoder(checkpoint("llama")), 60, service)
    driver.prefill(1, PROMPTS[1], Tier.HOST)
    assert driver.executor.status().cpu_attention_attached
    service.kill()
    result = driver.try_run(SubBatch(cpu_decodes=(1,)))
    assert result.error is ExecutionError.CPU_ATTENTION_LOST
    assert "gone" in result.error_message
    assert driver.try_run().error is ExecutionError.STALE
    status = driver.executor.status()
    assert not status.cpu_attention_attached
    assert (status.num_sequences, status.host_blocks_used, status.gpu_kv_bytes) == (0, 0, 0)


def test_a_service_that_dies_amid_an_iteration_is_noticed(
    checkpoint: GetFiles,
    make_driver: MakeDriver,
    start_cpu_attention: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed after the first layer's submit, while the executor waits."""
    service = start_cpu_attention()
    driver = make_driver(load_decoder(checkpoint("llama")), 60, service)
    driver.prefill(1, PROMPTS[1], Tier.HOST)
    epoch = driver.executor._epoch
    assert epoch is not None
    assert epoch.host is not None
    begin = epoch.host.begin

    def begin_then_kill(*arguments: Any) -> None:
        service.kill()
        begin(*arguments)

    monkeypatch.setattr(epoch.host, "begin", begin_then_kill)
    assert driver.try_run(SubBatch(cpu_decodes=(1,))).error is ExecutionError.CPU_ATTENTION_LOST
