"""Both backends against attention written out in float64, over shuffled blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_attention import HEAD_DIM, fill, plain, spec

from gpu_svc.attention import AttentionBackend, CpuAttention, TorchAttention
from gpu_svc.attention.torch_backend import _cut
from gpu_svc.kv_cache import KvPlaces, KvShape, write_kv
from gpu_svc.kv_layout import KvBlocks, by_token
from svc_common.decoder.dtypes import DTYPES

CPU = torch.device("cpu")


def backends(
    num_q_heads: int, num_kv_heads: int, window: int | None, softcap: float, block_tokens: int, dtype: str
) -> list[AttentionBackend]:
    model = spec(num_q_heads, num_kv_heads, window, softcap)
    shape = KvShape.of(model, block_tokens, DTYPES[dtype])
    return [CpuAttention(model, shape, torch.float32), TorchAttention(model, block_tokens, torch.float32, CPU)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    heads=st.sampled_from([(4, 4), (6, 2), (9, 3), (8, 1)]),
    block_tokens=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7, 64]),
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
)
def test_decode(
    lengths: list[int],
    heads: tuple[int, int],
    block_tokens: int,
    window: int | None,
    softcap: float,
    dtype: str,
) -> None:
    torch.manual_seed(0)
    num_q_heads, num_kv_heads = heads
    blocks, tables, sequences = fill(lengths, num_kv_heads, block_tokens, dtype)
    q = torch.randn(len(lengths), num_q_heads, HEAD_DIM)
    for backend in backends(num_q_heads, num_kv_heads, window, softcap, block_tokens, dtype):
        work = backend.decode(np.array(lengths), tables)
        for layer, layer_window in enumerate((window, None)):
            out = torch.full_like(q, float("nan"))
            work.run(layer, q, blocks, out)
            for i, (k, v) in enumerate(sequences):
                expected = plain(q[i : i + 1], k, v, torch.tensor([lengths[i] - 1]), layer_window, softcap)
                torch.testing.assert_close(out[i : i + 1].double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, 70),
    num_tokens=st.integers(1, 40),
    heads=st.sampled_from([(4, 4), (6, 2), (9, 3)]),
    block_tokens=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7, 64]),
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
)
def test_prefill(
    start: int,
    num_tokens: int,
    heads: tuple[int, int],
    block_tokens: int,
    window: int | None,
    softcap: float,
    dtype: str,
) -> None:
    torch.manual_seed(0)
    num_q_heads, num_kv_heads = heads
    end = start + num_tokens
    blocks, tables, (kv,) = fill([end], num_kv_heads, block_tokens, dtype)
    # As the decoder hands q over: part of a wider row.
    q = torch.randn(num_tokens, num_q_heads + 2, HEAD_DIM)[:, :num_q_heads]
    for backend in backends(num_q_heads, num_kv_heads, window, softcap, block_tokens, dtype):
        attention = backend.prefill(start, num_tokens, tables[0])
        for layer, layer_window in enumerate((window, None)):
            expected = plain(q, *kv, torch.arange(start, end), layer_window, softcap)
            out, on_host = torch.full(q.shape, float("nan")), torch.full(q.shape, float("nan"))
            attention.run(layer, q, blocks, out)
            attention.run_on_host(layer, q, KvBlocks(blocks), kv[:, start:].transpose(0, 1), on_host)
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(on_host.double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, 70),
    num_tokens=st.integers(1, 40),
    heads=st.sampled_from([(4, 4), (6, 2), (9, 3)]),
    block_tokens=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7, 64]),
)
def test_prefill_over_a_host_pool_in_int8(
    start: int, num_tokens: int, heads: tuple[int, int], block_tokens: int, window: int | None
) -> None:
    """The device's own cache is in fp32. Attended to is what lies in the pool, where torch takes the chunk itself as it
    was computed."""
    torch.manual_seed(0)
    num_q_heads, num_kv_heads = heads
    end = start + num_tokens
    kv = torch.randn(end, 2, num_kv_heads, HEAD_DIM)
    table = np.random.default_rng(0).permutation(-(-end // block_tokens)).astype(np.int32)
    elements = torch.full((len(table), 2, num_kv_heads, block_tokens * HEAD_DIM), 77, dtype=torch.int8)
    layer = KvBlocks(elements, torch.full(elements.shape[:-1], float("nan")))
    positions = np.arange(end)
    write_kv(layer, KvPlaces.on(CPU, table[positions // block_tokens], positions % block_tokens), kv)
    q = torch.randn(num_tokens, num_q_heads, HEAD_DIM)
    rounded = by_token(layer.select(0, torch.from_numpy(table.astype(np.int64))), HEAD_DIM)
    rounded = rounded.permute(0, 3, 1, 2, 4).flatten(0, 1)[:end]  # [end, 2, num_kv_heads, HEAD_DIM]
    torch.testing.assert_close(rounded, kv, rtol=0, atol=float(kv.abs().max()) / 127 / 2 * 1.001)
    model = spec(num_q_heads, num_kv_heads, window)
    shape = KvShape.of(model, block_tokens, torch.float32, torch.int8)
    cpu = CpuAttention(model, shape, torch.float32)
    by_torch = TorchAttention(model, block_tokens, torch.float32, CPU)
    for backend, attended in ((cpu, rounded), (by_torch, torch.cat([rounded[:start], kv[start:]]))):
        expected = plain(q, *attended.unbind(1), torch.arange(start, end), window, softcap=0.0)
        out = torch.full(q.shape, float("nan"))
        backend.prefill(start, num_tokens, table).run_on_host(0, q, layer, kv[start:], out)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("lengths", "max_blocks", "expected"),
    [
        ([], 100, []),
        ([5, 5, 5], 100, [(0, 3)]),
        ([5, 5, 5], 10, [(0, 2), (2, 3)]),
        ([50, 5, 5], 100, [(0, 1), (1, 3)]),
        ([10, 9, 8, 1], 100, [(0, 3), (3, 4)]),
        ([500], 100, [(0, 1)]),
    ],
)
def test_groups_are_bounded_and_little_padded(
    lengths: list[int], max_blocks: int, expected: list[tuple[int, int]]
) -> None:
    assert _cut(np.array(lengths, np.int64), max_blocks) == expected
