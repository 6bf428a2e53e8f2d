"""Decoupled and same-layer iterations yield the same tokens as all others, with a real cpu_attn_svc beside."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gpu import Driver, load_decoder
from support.reference import Reference, Verdict

from gpu_svc.cpu_attention_client import region_shape
from gpu_svc.host_tier import HostTier
from svc_common.model.store import ModelFiles
from svc_common.plan import (
    CohortStep,
    ExecutionError,
    IterationResult,
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
GetFiles = Callable[[str], ModelFiles]
GetReference = Callable[[str], Reference]

PROMPTS = {i: [(i * 71 + j * 29 + j * j) % 257 for j in range(4 + 9 * i)] for i in range(1, 7)}
HOST_VARIANTS = ("llama", "mistral-window", "qwen2", "qwen3")


def assert_reference_tokens(reference: Reference, driver: Driver, *sequence_ids: int) -> None:
    verdict = Verdict()
    for sequence_id in sequence_ids:
        reference.judge(PROMPTS[sequence_id], driver.tokens[sequence_id], verdict, str(sequence_id))
    assert not verdict.mismatches, str(verdict)


def run_step(
    driver: Driver, ids: tuple[int, ...], parts: tuple[int, ...], batch: SubBatch | None = None
) -> list[IterationResult]:
    """One step of a cohort in parts of so many layers, each beside `batch`, which consists of decodes."""
    results = []
    beside = (batch,) if batch else ()
    for number, num_layers in enumerate(parts):
        result = driver.run(*beside, cohort=CohortStep(ids, sum(parts[:number]), num_layers))
        yielded = [sequence_id for sequence_id, _ in result.tokens]
        own = list(batch.gpu_decodes) if batch else []
        assert yielded == (own if number + 1 < len(parts) else [*own, *ids])
        results.append(result)
    return results


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("variant", HOST_VARIANTS)
@pytest.mark.parametrize("parts", [(1, 1, 1), (2, 1), (3,)])
def test_prompts_and_decodes_beside_a_cohort(
    parts: tuple[int, ...],
    variant: str,
    checkpoint: GetFiles,
    reference: GetReference,
    make_driver: MakeDriver,
    cpu_attention: Any,
) -> None:
    """Prompts of both tiers are computed in odd chunks while the cohort goes on; then they decode, too."""
    driver = make_driver(load_decoder(checkpoint(variant)), 60, cpu_attention)
    tiers = {1: Tier.GPU, 2: Tier.HOST, 3: Tier.HOST, 4: Tier.GPU}
    for sequence_id, tier in tiers.items():
        driver.prefill(sequence_id, PROMPTS[sequence_id], tier, chunk_tokens=16, room_tokens=20)
    new = tuple(
        NewSequence(i, np.array(PROMPTS[i], "i4"), tier, driver.blocks(tier, len(PROMPTS[i]) + 20))
        for i, tier in ((5, Tier.HOST), (6, Tier.GPU))
    )
    start_layer = 0
    for step in range(6):
        chunks = tuple(
            PrefillChunk(i, step * size, min(size, len(PROMPTS[i]) - step * size))
            for i, size in {5: 9, 6: 11}.items()
            if step * size < len(PROMPTS[i])
        )
        num_layers = parts[step % len(parts)]
        driver.run(
            SubBatch(chunks, gpu_decodes=(1, 4)),
            cohort=CohortStep((3, 2), start_layer, num_layers),
            new_sequences=() if step else new,
        )
        start_layer = (start_layer + num_layers) % 3
    for _ in range(4):
        run_step(driver, (2, 5), parts, SubBatch(gpu_decodes=(6, 1)))
    assert_reference_tokens(reference(variant), driver, *PROMPTS)


@pytest.mark.parametrize("parts", [(7,), (1,) * 7, (2, 2, 2, 1), (3, 3, 1), (5, 2)])
@pytest.mark.parametrize("with_batch", [True, False])
def test_layers_of_cohort_and_batch_interleave(
    parts: tuple[int, ...],
    with_batch: bool,
    checkpoint: GetFiles,
    reference: GetReference,
    make_driver: MakeDriver,
    cpu_attention: Any,
) -> None:
    """Seven layers, in parts that divide them and parts that don't."""
    driver = make_driver(load_decoder(checkpoint("llama-deep")), 60, cpu_attention)
    for sequence_id in (1, 2, 3):
        tier = Tier.GPU if sequence_id == 1 else Tier.HOST
        driver.prefill(sequence_id, PROMPTS[sequence_id], tier, room_tokens=30)
    for _ in range(4):
        batch = SubBatch(gpu_decodes=(1,)) if with_batch else None
        results = run_step(driver, (2, 3), parts, batch)
        assert all(result.timings.cpu_attention_ns > 0 for result in results)
        assert all(0 < result.timings.cpu_wait_ns < result.timings.total_ns for result in results)
    context = sum(len(PROMPTS[i]) + 4 for i in (2, 3))
    assert [result.cpu_attended_tokens for result in results] == [0] * (len(parts) - 1) + [context]
    assert_reference_tokens(reference("llama-deep"), driver, 1, 2, 3)


def test_cohorts_follow_one_another(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Sequences join and leave between steps, grow by a block, move to the GPU and decode there, and come back."""
    driver = make_driver(load_decoder(checkpoint("llama")), 60, cpu_attention)
    for sequence_id in (1, 2, 3, 4):
        driver.prefill(sequence_id, PROMPTS[sequence_id], Tier.HOST, room_tokens=1)
    run_step(driver, (2, 3), (2, 1))
    for sequence_id in (1, 2, 3, 4):  # In a plan that does nothing else, between two steps.
        driver.run(new_blocks=(NewBlocks(sequence_id, tuple(driver.blocks(Tier.HOST, 12))),))
    run_step(driver, (4, 1), (1, 2))
    run_step(driver, (1, 2, 3, 4), (1, 1, 1))
    to_gpu = Swap(2, Tier.GPU, tuple(driver.blocks(Tier.GPU, 60)))
    first = driver.run(SubBatch(gpu_decodes=(2,)), cohort=CohortStep((3, 1), 0, 2), swaps=(to_gpu,))
    assert first.swapped_in_bytes > 0
    driver.run(SubBatch(gpu_decodes=(2,)), cohort=CohortStep((3, 1), 2, 1))
    to_host = Swap(2, Tier.HOST, tuple(driver.blocks(Tier.HOST, 60)))
    driver.run(cohort=CohortStep((2, 4), 0, 3), swaps=(to_host,))
    driver.run(SubBatch(cpu_decodes=(1, 2)), SubBatch(cpu_decodes=(3, 4)))
    assert_reference_tokens(reference("llama"), driver, 1, 2, 3, 4)


def test_a_step_waits_while_others_run(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Iterations of every other mode between its parts, over the same exchange slots."""
    driver = make_driver(load_decoder(checkpoint("llama")), 60, cpu_attention)
    tiers = {1: Tier.GPU, 2: Tier.HOST, 3: Tier.HOST, 4: Tier.HOST, 5: Tier.GPU}
    for sequence_id, tier in tiers.items():
        driver.prefill(sequence_id, PROMPTS[sequence_id], tier, room_tokens=20)
    driver.run(cohort=CohortStep((2, 3), 0, 1))
    driver.run(SubBatch(gpu_decodes=(1, 5)))
    driver.run(SubBatch(gpu_decodes=(1,)), SubBatch(cpu_decodes=(4,)))
    driver.run(released=(5,))
    driver.run(SubBatch(gpu_decodes=(1,)), cohort=CohortStep((2, 3), 1, 1))
    driver.run(SubBatch(gpu_decodes=(1,), cpu_decodes=(4,)), mode=Mode.SAME_LAYER)
    last = driver.run(cohort=CohortStep((2, 3), 2, 1))
    assert [sequence_id for sequence_id, _ in last.tokens] == [2, 3]
    driver.run(SubBatch(gpu_decodes=(1,), cpu_decodes=(2, 3, 4)))
    assert_reference_tokens(reference("llama"), driver, 1, 2, 3, 4)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("variant", HOST_VARIANTS)
def test_one_batch_attended_by_both(
    variant: str, checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Same-layer iterations, with prompts for both tiers among the decodes."""
    driver = make_driver(load_decoder(checkpoint(variant)), 60, cpu_attention)
    tiers = {1: Tier.GPU, 2: Tier.HOST, 3: Tier.HOST}
    for sequence_id, tier in tiers.items():
        driver.prefill(sequence_id, PROMPTS[sequence_id], tier, room_tokens=20)
    new = tuple(
        NewSequence(i, np.array(PROMPTS[i], "i4"), tier, driver.blocks(tier, len(PROMPTS[i]) + 20))
        for i, tier in ((4, Tier.HOST), (5, Tier.GPU))
    )
    for start in (0, 10, 20, 30):
        chunks = (PrefillChunk(4, start, 10), PrefillChunk(5, start, 10))
        batch = SubBatch(chunks, gpu_decodes=(1,), cpu_decodes=(3, 2))
        driver.run(batch, mode=Mode.SAME_LAYER, new_sequences=() if start else new)
    driver.run(SubBatch((PrefillChunk(5, 40, 9),), cpu_decodes=(4, 2)), mode=Mode.SAME_LAYER)
    for _ in range(4):
        driver.run(SubBatch(gpu_decodes=(5, 1), cpu_decodes=(2, 3, 4)), mode=Mode.SAME_LAYER)
    assert_reference_tokens(reference(variant), driver, 1, 2, 3, 4, 5)


def test_samples_and_logprobs_are_those_of_other_modes(
    checkpoint: GetFiles, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    decoder = load_decoder(checkpoint("llama"))
    sampling = {i: Sampling(temperature=1.2, top_p=0.95, seed=100 + i, num_logprobs=i) for i in (2, 3)}
    found = []
    for decoupled in (True, False):
        driver = make_driver(decoder, 60, cpu_attention)
        for sequence_id in (2, 3):
            driver.prefill(sequence_id, PROMPTS[sequence_id], Tier.HOST, sampling=sampling[sequence_id])
        logprobs = []
        for _ in range(6):
            if decoupled:
                begun, *_, ended = run_step(driver, (2, 3), (1, 2))
                assert begun.logprobs == {}
            else:
                ended = driver.run(SubBatch(cpu_decodes=(2, 3)))
            assert {i: len(row.top) for i, row in ended.logprobs.items()} == {2: 2, 3: 3}
            logprobs += [value for row in ended.logprobs.values() for value in (row.chosen, *dict(row.top).values())]
        found.append((driver.tokens, logprobs))
        driver.executor.close_epoch()
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)


def test_a_cohort_grows_over_blocks_of_its_own(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Each block comes in the plan that begins the step which needs it."""
    driver = make_driver(load_decoder(checkpoint("qwen3")), 0, cpu_attention)
    driver.prefill(2, PROMPTS[2], Tier.HOST, room_tokens=0)  # 22 tokens in 6 blocks of 4.
    for num_tokens in range(23, 33):
        more = (NewBlocks(2, tuple(driver.blocks(Tier.HOST, 4))),) if num_tokens % 4 == 1 else ()
        driver.run(cohort=CohortStep((2,), 0, 2), new_blocks=more)
        driver.run(cohort=CohortStep((2,), 2, 1))
    assert len(driver.tokens[2]) == 11
    assert_reference_tokens(reference("qwen3"), driver, 2)


# --- what ends a step early


def test_a_service_that_dies_between_the_parts_of_a_step(
    checkpoint: GetFiles, make_driver: MakeDriver, start_cpu_attention: Callable[[], Any]
) -> None:
    service = start_cpu_attention()
    driver = make_driver(load_decoder(checkpoint("llama")), 60, service)
    driver.prefill(1, PROMPTS[1], Tier.HOST)
    driver.run(cohort=CohortStep((1,), 0, 1))
    service.kill()
    result = driver.try_run(cohort=CohortStep((1,), 1, 1))
    assert result.error is ExecutionError.CPU_ATTENTION_LOST
    alone = Driver(driver.executor, epoch=2)
    alone.prefill(2, PROMPTS[2])
    assert alone.try_run(cohort=CohortStep((1,), 1, 1)).error is ExecutionError.INVALID_PLAN


def test_a_service_that_dies_amid_a_part(
    checkpoint: GetFiles,
    make_driver: MakeDriver,
    start_cpu_attention: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = start_cpu_attention()
    driver = make_driver(load_decoder(checkpoint("llama")), 60, service)
    driver.prefill(1, PROMPTS[1], Tier.HOST)
    driver.prefill(2, PROMPTS[2])
    driver.run(SubBatch(gpu_decodes=(2,)), cohort=CohortStep((1,), 0, 1))
    assert driver.host is not None
    submit = driver.host.submit

    def kill_then_submit(*arguments: Any) -> None:
        service.kill()
        submit(*arguments)

    monkeypatch.setattr(driver.host, "submit", kill_then_submit)
    result = driver.try_run(SubBatch(gpu_decodes=(2,)), cohort=CohortStep((1,), 1, 2))
    assert (result.error, result.tokens) == (ExecutionError.CPU_ATTENTION_LOST, ())


def test_a_new_epoch_forgets_the_step(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    decoder = load_decoder(checkpoint("llama"))
    driver = make_driver(decoder, 60, cpu_attention)
    driver.prefill(1, PROMPTS[1], Tier.HOST)
    driver.run(cohort=CohortStep((1,), 0, 2))
    shape = region_shape(decoder, driver.executor.kv_shape, driver.limits)
    again = Driver(driver.executor, HostTier([cpu_attention.attach(decoder, shape)]), epoch=2)
    again.prefill(1, PROMPTS[1], Tier.HOST)
    for _ in range(3):
        run_step(again, (1,), (1, 2))
    assert_reference_tokens(reference("llama"), again, 1)
