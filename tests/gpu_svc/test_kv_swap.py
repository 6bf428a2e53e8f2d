"""Blocks from tier to tier in every pair of types: by the kernels and by torch's own operations."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_attention import Pool, decode, to_pool

from gpu_svc.kv_cache import KvShape
from gpu_svc.kv_layout import KvBlocks, by_token, to_blocks
from gpu_svc.kv_swap import BlockMoves, copy_blocks, copy_by_torch, cross
from gpu_svc.link import Link
from svc_common.decoder.dtypes import KV_DTYPES

NUM_LAYERS, NUM_KV_HEADS = 2, 3
DTYPES = st.sampled_from(["fp32", "fp16", "bf16", "int8"])


def as_blocks(pool: Pool) -> KvBlocks:
    elements = torch.from_numpy(pool.blocks)
    if elements.dtype == torch.uint16:
        elements = elements.view(torch.bfloat16)
    return KvBlocks(elements, None if pool.scales is None else torch.from_numpy(pool.scales))


def numbers(num_blocks: int, block_tokens: int, head_dim: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((NUM_LAYERS, num_blocks, 2, NUM_KV_HEADS, block_tokens, head_dim))


@settings(max_examples=60, deadline=None)
@given(block_tokens=st.sampled_from([1, 4, 7]), head_dim=st.sampled_from([1, 8, 15]), dtype=DTYPES)
def test_layouts_are_those_of_the_kernels(block_tokens: int, head_dim: int, dtype: str) -> None:
    pool = to_pool(numbers(3, block_tokens, head_dim), dtype)
    meant = torch.from_numpy(pool.values(head_dim))
    blocks = as_blocks(pool)
    read = by_token(blocks, head_dim)
    torch.testing.assert_close(read.double(), meant, rtol=1e-6, atol=0)
    written = to_blocks(read, KV_DTYPES[dtype])
    assert torch.equal(written.elements, blocks.elements)
    if blocks.scales is not None:
        assert written.scales is not None
        torch.testing.assert_close(written.scales, blocks.scales, rtol=1e-6, atol=0)


@settings(max_examples=100, deadline=None)
@given(
    num_tokens=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    head_dim=st.sampled_from([8, 15]),
    source_dtype=DTYPES,
    target_dtype=DTYPES,
    by_torch=st.booleans(),
)
def test_what_counts_arrives_and_what_lies_behind_it_has_no_say(
    num_tokens: list[int], head_dim: int, source_dtype: str, target_dtype: str, by_torch: bool
) -> None:
    moved = len(num_tokens)
    random = np.random.default_rng(moved)
    counts = np.array(num_tokens, np.int32)
    moves = BlockMoves(*(random.permutation(moved + 2)[:moved].astype(np.int32) for _ in range(2)), counts)
    values = numbers(moved + 2, 7, head_dim)
    for block, count in zip(moves.source, counts, strict=True):
        values[:, block, :, :, count:] = 3e4 if source_dtype != "int8" else np.nan
    source = to_pool(values, source_dtype)
    target = as_blocks(to_pool(numbers(moved + 2, 7, head_dim), target_dtype))
    before = by_token(target, head_dim)
    (copy_by_torch if by_torch else copy_blocks)(as_blocks(source), target, moves, head_dim)
    got, want = by_token(target, head_dim).double().numpy(), source.values(head_dim)
    for source_block, target_block, count in zip(moves.source, moves.target, counts, strict=True):
        exact = want[:, source_block, :, :, :count]
        bound = np.abs(exact) * {"fp32": 1e-6, "fp16": 2**-11, "bf16": 2**-8, "int8": 1e-6}[target_dtype] + 2.0**-25
        if target_dtype == "int8" and source_dtype != "int8":
            bound = np.abs(exact).max(axis=(-2, -1), keepdims=True) / 254 * (1 + 5e-5)
        assert (np.abs(got[:, target_block, :, :, :count] - exact) <= bound).all()
    untouched = sorted(set(range(moved + 2)) - set(moves.target.tolist()))
    assert torch.equal(by_token(target, head_dim)[:, untouched], before[:, untouched])


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_swap_may_be_larger_than_its_staging(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_svc.kv_swap._COPY_BYTES", 1)
    source = to_pool(numbers(4, 4, 8), "fp32")
    target = as_blocks(to_pool(numbers(4, 4, 8), dtype))
    order = np.array([2, 0, 3], np.int32)
    moves = BlockMoves(np.arange(3, dtype=np.int32), order, np.full(3, 4, np.int32))
    copy_by_torch(as_blocks(source), target, moves, 8)
    atol = 0.0 if dtype == "fp32" else np.abs(decode(source.blocks)).max() / 250
    np.testing.assert_allclose(by_token(target, 8)[:, order], source.values(8)[:, :3], rtol=0, atol=atol)


def test_what_is_no_number_stays_none() -> None:
    """In int8 all of its block and head is NaN then, by the kernels and by torch alike."""
    values = numbers(1, 4, 8)
    values[0, 0, 0, 1, 2, 3] = np.inf
    values[1, 0, 1, 2, 0, 0] = np.nan
    source = KvBlocks(torch.from_numpy(to_pool(values, "fp32").blocks))
    one = np.zeros(1, np.int32)
    for copy in (copy_blocks, copy_by_torch):
        target = as_blocks(to_pool(numbers(1, 4, 8), "int8"))
        copy(source, target, BlockMoves(one, one, np.full(1, 4, np.int32)), 8)
        is_nan = by_token(target, 8).isnan()
        assert is_nan[0, 0, 0, 1].all()
        assert is_nan[1, 0, 1, 2].all()
        assert is_nan.sum() == 2 * 4 * 8


def test_swaps_cross_the_link_in_the_hosts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each direction by its own lane; nothing crosses where nothing moves."""
    shape = KvShape(NUM_LAYERS, NUM_KV_HEADS, 4, 8, torch.float32, torch.int8)
    gpu, host = (as_blocks(to_pool(numbers(4, 4, 8), dtype)) for dtype in ("fp32", "int8"))
    before = gpu.elements[:, 0].clone()
    link, crossed = Link(), []

    def lane(name: str) -> Callable[[int, float, Callable[[], object]], None]:
        def pace(num_bytes: int, requested_s: float, copy: Callable[[], object]) -> None:
            crossed.append((name, num_bytes))
            copy()

        return pace

    monkeypatch.setattr(link.to_host, "pace", lane("out"))
    monkeypatch.setattr(link.to_device, "pace", lane("in"))

    def moves(source: int, target: int) -> BlockMoves:
        return BlockMoves(*(np.array([value], np.int32) for value in (source, target, 4)))

    cross(link.to_host, gpu, host, moves(0, 3), shape)
    cross(link.to_device, host, gpu, moves(3, 1), shape)
    block_bytes = 2 * NUM_LAYERS * NUM_KV_HEADS * (4 * 8 + 4)  # A byte each, and a scale.
    assert crossed == [("out", block_bytes), ("in", block_bytes)]
    torch.testing.assert_close(gpu.elements[:, 1], before, rtol=0, atol=0.02)
    nothing = BlockMoves(*(np.zeros(0, np.int32) for _ in range(3)))
    cross(link.to_host, gpu, host, nothing, shape)
    cross(link.to_device, host, gpu, nothing, shape)
    assert len(crossed) == 2
