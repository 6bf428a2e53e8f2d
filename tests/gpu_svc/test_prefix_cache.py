"""Sequences that begin in the same blocks get the tokens of the reference, on either tier, whoever leaves first."""

from collections.abc import Callable
from typing import Any

import pytest
from support.gpu import BLOCK_TOKENS, Driver, load_decoder
from support.reference import Reference, Verdict

from svc_common.model.store import ModelFiles
from svc_common.plan import ExecutionError, NewSequence, PrefillChunk, SubBatch, Swap, Tier

BEGINNING = [(53 + j * 31 + j * j) % 257 for j in range(3 * BLOCK_TOKENS)]
PROMPTS = {1: [*BEGINNING, 5, 7], 2: [*BEGINNING, 11], 3: [*BEGINNING, 5, 7, 13, 17, 19, 23]}


def sharing(driver: Driver, sequence_id: int, tier: Tier, shared: list[int]) -> NewSequence:
    """A sequence whose first blocks are `shared`."""
    prompt = PROMPTS[sequence_id]
    own = driver.blocks(tier, len(prompt) + 20 - len(BEGINNING)).tolist()
    return NewSequence(sequence_id, tuple(prompt), tier, (*shared, *own), num_cached_tokens=len(BEGINNING))


def decodes(tier: Tier, *sequence_ids: int) -> SubBatch:
    return SubBatch(gpu_decodes=sequence_ids) if tier is Tier.GPU else SubBatch(cpu_decodes=sequence_ids)


def rest_of(sequence_id: int) -> PrefillChunk:
    start = len(BEGINNING)
    return PrefillChunk(sequence_id, start, len(PROMPTS[sequence_id]) - start)


def judge(reference: Reference, driver: Driver) -> None:
    verdict = Verdict()
    for sequence_id, prompt in PROMPTS.items():
        reference.judge(prompt, driver.tokens[sequence_id], verdict, str(sequence_id))
    assert not verdict.mismatches, str(verdict)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])
def test_shared_blocks(
    tier: Tier,
    variant: str,
    checkpoint: Callable[[str], ModelFiles],
    reference: Callable[[str], Reference],
    make_driver: Callable[..., Driver],
    cpu_attention: Any,
) -> None:
    """The first owner computes; the second shares beside it; the third shares what both have left."""
    driver = make_driver(load_decoder(checkpoint(variant)), 80, cpu_attention)
    table = driver.executor._epoch.table  # type: ignore[union-attr]
    driver.prefill(1, PROMPTS[1], tier, room_tokens=20)
    shared = table.block_tables[table.slot_of[1], :3].tolist()
    driver.run(decodes(tier, 1))
    used = table.owned[tier].num_used
    second = sharing(driver, 2, tier, shared)
    driver.run(SubBatch(prefills=(rest_of(2),)), new_sequences=(second,))
    assert table.owned[tier].num_used == used + len(second.blocks) - 3
    for _ in range(4):
        driver.run(decodes(tier, 1, 2))
    driver.run(decodes(tier, 2), released=(1,))
    driver.run(SubBatch(prefills=(rest_of(3),)), released=(2,), new_sequences=(sharing(driver, 3, tier, shared),))
    for _ in range(5):
        driver.run(decodes(tier, 3))
    driver.run(released=(3,))
    assert table.owned[tier].num_used == 0
    judge(reference(variant), driver)


def test_one_of_two_owners_moves(
    checkpoint: Callable[[str], ModelFiles],
    reference: Callable[[str], Reference],
    make_driver: Callable[..., Driver],
    cpu_attention: Any,
) -> None:
    """Its copy on the host is its own; who stays on the GPU keeps the blocks, and a third shares the copy."""
    driver = make_driver(load_decoder(checkpoint("llama")), 80, cpu_attention)
    table = driver.executor._epoch.table  # type: ignore[union-attr]
    driver.prefill(1, PROMPTS[1], room_tokens=20)
    shared = table.block_tables[table.slot_of[1], :3].tolist()
    driver.run(SubBatch(prefills=(rest_of(2),)), new_sequences=(sharing(driver, 2, Tier.GPU, shared),))
    on_host = driver.blocks(Tier.HOST, len(PROMPTS[1]) + 20)
    driver.run(SubBatch(gpu_decodes=(2,), cpu_decodes=(1,)), swaps=(Swap(1, Tier.HOST, tuple(on_host.tolist())),))
    third = sharing(driver, 3, Tier.HOST, on_host[:3].tolist())
    driver.run(SubBatch(prefills=(rest_of(3),), gpu_decodes=(2,), cpu_decodes=(1,)), new_sequences=(third,))
    for _ in range(6):
        driver.run(SubBatch(gpu_decodes=(2,), cpu_decodes=(1, 3)))
    judge(reference("llama"), driver)


@pytest.mark.parametrize(
    ("num_cached", "num_blocks", "message"),
    [
        (BLOCK_TOKENS - 1, 12, "tokens cached; whole blocks"),
        (3 * BLOCK_TOKENS, 12, "less than all"),
        (2 * BLOCK_TOKENS, 1, "8 tokens cached in 1 blocks"),
    ],
)
def test_what_cannot_be_cached_is_refused(
    num_cached: int,
    num_blocks: int,
    message: str,
    checkpoint: Callable[[str], ModelFiles],
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver(load_decoder(checkpoint("llama")), 80)
    new = NewSequence(1, tuple(BEGINNING), Tier.GPU, tuple(range(num_blocks)), num_cached_tokens=num_cached)
    result = driver.try_run(new_sequences=(new,))
    assert result.error is ExecutionError.INVALID_PLAN
    assert message in result.error_message
