"""KV in int8: what writing, appending and copying keep of the numbers, and how far attention over them may be off."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_attention import Array, Pool, attention, decode, encode, to_pool
from support.kernels import DTYPES, EACH_INSTRUCTION_SET, INT16_TOLERANCE, KV_DTYPES, RUNNABLE, Case

from svc_common.cpu_kernels import DecodeWork, PrefillWork, ThreadPool, copy_blocks, write_kv
from svc_common.tensor_plane import PlaneError

THREADS = ThreadPool(2)
ROUNDING = 1 + 5e-5
"""Of bounds that fp32 rounds."""


def garbage(num_blocks: int, num_kv_heads: int, block_tokens: int, head_dim: int) -> Pool:
    """A layer that others have used."""
    numbers = np.random.default_rng(1).integers(-128, 127, (num_blocks, 2, num_kv_heads, block_tokens * head_dim))
    return Pool(numbers.astype(np.int8), np.full((num_blocks, 2, num_kv_heads), np.nan, np.float32))


def write(pool: Pool, start: int, kv: Array, block_tokens: int, instruction_set: str = "auto") -> None:
    """Tokens [n, 2, num_kv_heads, head_dim] of a sequence in blocks 0, 1, ..., after `start` others."""
    positions = np.arange(start, start + len(kv), dtype=np.int32)
    blocks, offsets = positions // block_tokens, positions % block_tokens
    write_kv(THREADS, pool.blocks, blocks, offsets, kv, instruction_set, pool.scales)


def in_runs(num_tokens: int, lengths: list[int]) -> Iterator[slice]:
    """Cuts tokens into runs of these lengths, again and again."""
    start = i = 0
    while start < num_tokens:
        end = min(num_tokens, start + lengths[i % len(lengths)])
        yield slice(start, end)
        start, i = end, i + 1


def growths_after(kv: Array, runs: list[slice], block_tokens: int) -> Array:
    """[n, 2, num_kv_heads]: how often a token's block got a larger scale after it was written."""
    magnitudes = np.abs(kv).max(axis=-1)
    counts = np.zeros(magnitudes.shape, int)
    for first in range(0, len(kv), block_tokens):
        end = min(len(kv), first + block_tokens)
        largest = np.zeros(magnitudes.shape[1:])
        for run in runs:
            begin, stop = max(first, run.start), min(end, run.stop)
            if begin >= stop:
                continue
            grown = np.maximum(largest, magnitudes[begin:stop].max(axis=0))
            counts[first:begin] += grown > largest
            largest = grown
    return counts


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 60),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    block_tokens=st.sampled_from([1, 2, 5, 16, 21]),
    head_dim=st.sampled_from([2, 15, 32, 64, 80]),
    num_kv_heads=st.integers(1, 3),
    growth=st.sampled_from([0.0, 0.02, 0.1]),
    dtype=st.sampled_from(DTYPES),
    instruction_set=st.sampled_from(RUNNABLE),
)
def test_a_number_is_off_by_half_a_scale_for_each_time_it_is_rounded(
    num_tokens: int,
    lengths: list[int],
    block_tokens: int,
    head_dim: int,
    num_kv_heads: int,
    growth: float,
    dtype: str,
    instruction_set: str,
) -> None:
    """Once where its block's tokens come together, once more whenever a later one is larger."""
    random = np.random.default_rng(num_tokens)
    kv = random.standard_normal((num_tokens, 2, num_kv_heads, head_dim))
    kv *= np.exp(growth * np.arange(num_tokens))[:, None, None, None]
    kv = encode(kv, dtype)
    num_blocks = -(-num_tokens // block_tokens)
    pool = garbage(num_blocks + 1, num_kv_heads, block_tokens, head_dim)
    before = pool.blocks.copy()
    runs = list(in_runs(num_tokens, lengths))
    for run in runs:
        write(pool, run.start, kv[run], block_tokens, instruction_set)
    assert pool.scales is not None
    np.testing.assert_array_equal(pool.blocks[num_blocks:], before[num_blocks:])
    assert np.isnan(pool.scales[num_blocks:]).all()

    values, exact = pool.values(head_dim), decode(kv)
    positions = np.arange(num_tokens)
    blocks = positions // block_tokens
    got = values[blocks, :, :, positions % block_tokens]
    scales = pool.scales[blocks].astype(np.float64)
    bound = (1 + growths_after(decode(kv), runs, block_tokens)) / 2 * scales * ROUNDING
    assert (np.abs(got - exact).max(axis=-1) <= bound).all()
    for block in range(num_blocks):
        largest = np.abs(exact[blocks == block]).max(axis=(0, 3))
        np.testing.assert_allclose(pool.scales[block], largest / 127, rtol=1e-6)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("block_tokens", [4, 7])
def test_each_instruction_set_rounds_alike(instruction_set: str, block_tokens: int) -> None:
    kv = np.random.default_rng(5).standard_normal((30, 2, 2, 40)).astype(np.float32)
    kv *= np.exp(0.1 * np.arange(30, dtype=np.float32))[:, None, None, None]
    plain, other = garbage(8, 2, block_tokens, 40), garbage(8, 2, block_tokens, 40)
    for start in range(30):
        write(plain, start, kv[start : start + 1], block_tokens, "scalar")
        write(other, start, kv[start : start + 1], block_tokens, instruction_set)
    np.testing.assert_array_equal(other.scales, plain.scales)
    np.testing.assert_array_equal(other.blocks, plain.blocks)


@EACH_INSTRUCTION_SET
def test_a_block_that_is_used_again_forgets(instruction_set: str) -> None:
    """Neither a huge number nor a NaN of its former owner has a say once its first token is written."""
    pool = garbage(1, 1, 4, 8)
    huge = np.full((4, 2, 1, 8), 1e30, np.float32)
    huge[3] = np.nan
    write(pool, 0, huge, 4, instruction_set)
    assert pool.scales is not None
    assert np.isnan(pool.scales).all()
    small = np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 2, 1, 8)
    write(pool, 0, small, 4, instruction_set)
    np.testing.assert_allclose(pool.values(8)[0, :, :, 0], small[0], atol=1 / 254)


@EACH_INSTRUCTION_SET
def test_zeros_and_the_tiniest_numbers(instruction_set: str) -> None:
    pool = garbage(1, 1, 4, 8)
    tokens = np.zeros((4, 2, 1, 8), np.float32)
    tokens[1], tokens[2], tokens[3] = 1e-42, 1e-30, 3.0
    for i, token in enumerate(tokens):
        write(pool, i, token[None], 4, instruction_set)
        values = pool.values(8)[0, :, 0, : i + 1]
        exact = tokens[: i + 1, :, 0].swapaxes(0, 1)
        np.testing.assert_allclose(values, exact, rtol=0, atol=np.abs(exact).max() / 254 + 2e-36)
    assert pool.scales is not None
    np.testing.assert_allclose(pool.scales, 3 / 127, rtol=1e-6)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_number_makes_its_head_and_all_that_sees_it_nan(
    instruction_set: str, place: int, special: float
) -> None:
    case = Case(num_q_heads=4, num_kv_heads=2, head_dim=32, kv_dtype="int8")
    random = np.random.default_rng(3)
    kv = random.standard_normal((40, 2, 2, 32)).astype(np.float32)
    kv[19, place, 1, 7] = special
    pool = garbage(3, 2, 16, 32)
    for start in range(40):
        write(pool, start, kv[start : start + 1], 16, instruction_set)
    q = random.standard_normal((2, 4, 32)).astype(np.float32)
    out = np.zeros_like(q)
    tables = np.tile(np.arange(3, dtype=np.int32), (2, 1))
    work = DecodeWork(case.attention(instruction_set, 1), np.array([16, 40], np.int32), tables)
    work.run(q, pool.blocks, out, pool.scales)
    assert np.isfinite(out[0]).all()
    assert np.isfinite(out[1, :2]).all()
    assert np.isnan(out[1, 2:]).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([(1, 1), (6, 2), (8, 1), (9, 3)]),
    head_dim=st.sampled_from([16, 33, 64, 128]),
    block_tokens=st.sampled_from([5, 16]),
    num_tokens=st.integers(1, 200),
    instruction_set=st.sampled_from(RUNNABLE),
)
def test_attention_beside_that_over_the_numbers_before_they_were_rounded(
    heads: tuple[int, int], head_dim: int, block_tokens: int, num_tokens: int, instruction_set: str
) -> None:
    """With errors e_k of keys and e_v of values, scores are off by d = scale * sum|q| * e_k at most, weights by a
    factor within e^(-2d) and e^(2d), outputs by e_v + (e^(2d) - 1) * max|v|."""
    case = Case(*heads, head_dim=head_dim, block_tokens=block_tokens, kv_dtype="int8")
    random = np.random.default_rng(num_tokens)
    kv = random.standard_normal((num_tokens, 2, heads[1], head_dim)).astype(np.float32)
    q = random.standard_normal((1, heads[0], head_dim)).astype(np.float32)
    num_blocks = -(-num_tokens // block_tokens)
    pool = garbage(num_blocks, heads[1], block_tokens, head_dim)
    write(pool, 0, kv, block_tokens, instruction_set)
    exact = np.zeros((num_blocks * block_tokens, 2, heads[1], head_dim))
    exact[:num_tokens] = kv
    exact = exact.reshape(num_blocks, block_tokens, 2, heads[1], head_dim).transpose(0, 2, 3, 1, 4)
    table, context = np.arange(num_blocks, dtype=np.int32)[None], np.array([num_tokens], np.int32)
    want = attention(q, exact, table, context, case.softmax_scale, 0)

    assert pool.scales is not None
    error = pool.scales.astype(np.float64).max(axis=0) / 2  # [2, num_kv_heads]
    by_head = np.repeat(error, heads[0] // heads[1], axis=1)
    score = case.softmax_scale * np.abs(q[0]).sum(axis=-1) * by_head[0]
    bound = by_head[1] + np.expm1(2 * score) * np.abs(kv[:, 1]).max() + INT16_TOLERANCE
    outs = [np.empty_like(q), np.empty_like(q)]
    DecodeWork(case.attention(instruction_set, 1), context, table).run(q, pool.blocks, outs[0], pool.scales)
    last = PrefillWork(case.attention(instruction_set, 1), num_tokens - 1, 1, table[0])
    last.run(q, pool.blocks, outs[1], pool.scales)
    for out in outs:
        assert (np.abs(out - want)[0].max(axis=-1) <= bound).all()


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("target_dtype", KV_DTYPES)
@pytest.mark.parametrize("source_dtype", KV_DTYPES)
@pytest.mark.parametrize(("block_tokens", "head_dim"), [(16, 64), (5, 15)])
def test_blocks_are_copied_between_types(
    instruction_set: str, source_dtype: str, target_dtype: str, block_tokens: int, head_dim: int
) -> None:
    """Of each block what counts; what lies behind it, here far larger, has no say."""
    num_layers, num_heads = 2, 3
    random = np.random.default_rng(0)
    source_blocks, target_blocks = (np.array(ids, np.int32) for ids in ([4, 0, 2], [1, 3, 0]))
    num_tokens = np.array([block_tokens, 3, 1], np.int32)
    values = random.standard_normal((num_layers, 5, 2, num_heads, block_tokens, head_dim))
    for block, count in zip(source_blocks, num_tokens, strict=True):
        values[:, block, :, :, count:] = 1e4 if source_dtype != "int8" else np.nan
    source = to_pool(values, source_dtype)
    target = to_pool(np.full((num_layers, 4, 2, num_heads, block_tokens, head_dim), 7.0), target_dtype)
    sides = ((source.blocks, source.scales, source_blocks), (target.blocks, target.scales, target_blocks))
    copy_blocks(THREADS, *sides[0], *sides[1], num_tokens, head_dim, instruction_set)
    got, want = target.values(head_dim), source.values(head_dim)
    precision = {"fp32": 1e-7, "fp16": 2**-11, "bf16": 2**-8, "int8": 0.0}[target_dtype]
    for source_block, target_block, count in zip(source_blocks, target_blocks, num_tokens, strict=True):
        exact = want[:, source_block, :, :, :count]
        bound = np.abs(exact) * precision + 2.0**-25  # half of the least fp16
        if target_dtype == "int8":
            bound = np.abs(exact).max(axis=(-2, -1), keepdims=True) / 254 * ROUNDING
        assert (np.abs(got[:, target_block, :, :, :count] - exact) <= bound).all()
    np.testing.assert_allclose(got[:, 2], 7.0, rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    pool, kv = garbage(3, 1, 4, 8), np.ones((3, 2, 1, 8), np.float32)
    before = pool.blocks.copy()

    def write_at(blocks: list[int], offsets: list[int], scales: Array | None = pool.scales) -> None:
        write_kv(THREADS, pool.blocks, np.array(blocks, np.int32), np.array(offsets, np.int32), kv, "auto", scales)

    with pytest.raises(PlaneError, match="tokens of block 1 do not follow one another"):
        write_at([1, 0, 1], [0, 0, 1])
    with pytest.raises(PlaneError, match="tokens of block 1 do not follow one another"):
        write_at([1, 1, 0], [1, 0, 0])
    with pytest.raises(ValueError, match="scales belong to blocks in int8"):
        write_at([0, 0, 0], [0, 1, 2], None)
    with pytest.raises(ValueError, match="scales are not float32"):
        write_at([0, 0, 0], [0, 1, 2], np.ones((3, 2, 2), np.float32))
    floats = np.zeros((3, 2, 1, 32), np.float32)
    with pytest.raises(ValueError, match="scales belong to blocks in int8"):
        write_kv(THREADS, floats, np.zeros(1, np.int32), np.zeros(1, np.int32), kv[:1], "auto", pool.scales)
    np.testing.assert_array_equal(pool.blocks, before)
    with pytest.raises(PlaneError, match="not exchanged in int8"):
        Case(exchange_dtype="int8").attention("auto", 1)

    one, two = np.zeros(1, np.int32), np.full(1, 2, np.int32)
    cache, scales = floats[None], None
    with pytest.raises(PlaneError, match="copy of 2 tokens of block 0 of 3 to block 2 of 2"):
        copy_blocks(THREADS, cache, scales, one, cache[:, :2].copy(), scales, two, two, 8, "auto")
    with pytest.raises(PlaneError, match="copy of 5 tokens"):
        copy_blocks(THREADS, cache, scales, one, cache, scales, two, np.full(1, 5, np.int32), 8, "auto")
    with pytest.raises(ValueError, match="not of one shape"):
        copy_blocks(THREADS, cache, scales, one, np.zeros((1, 3, 2, 2, 32), np.float32), scales, two, two, 8, "auto")
