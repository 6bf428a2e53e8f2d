"""Each kernel that runs here against the formula in float64."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_attention import TOLERANCE, Array, attention, decode, encode

from svc_common import cpu_kernels
from svc_common.tensor_plane import PlaneError

INSTRUCTION_SETS = cpu_kernels.runnable_instruction_sets()
DTYPES = ["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class Case:
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_tokens: int = 16
    window: int = 0
    kv_dtype: str = "fp32"
    exchange_dtype: str = "fp32"
    scale: float | None = None


def run_and_compare(case: Case, context_tokens: list[int], instruction_set: str, num_threads: int, seed: int) -> None:
    """Poisons whatever is not to be read: unused blocks, and unused tails of used ones."""
    random = np.random.default_rng(seed)
    context = np.array(context_tokens, np.int32)
    num_blocks = -(-context // case.block_tokens)
    stride = int(num_blocks.max())
    ids = random.permutation(int(num_blocks.sum()) + 3).astype(np.int32)
    tables = np.full((len(context), stride), -1, np.int32)
    shape = (len(ids), 2, case.num_kv_heads, case.block_tokens, case.head_dim)
    pool = encode(np.full(shape, np.nan), case.kv_dtype)
    first = 0
    for row, length, count in zip(tables, context, num_blocks, strict=True):
        row[:count] = ids[first : first + count]
        first += count
        positions = np.arange(length)
        values = random.standard_normal((length, 2, case.num_kv_heads, case.head_dim))
        blocks = row[positions // case.block_tokens]
        pool[blocks, :, :, positions % case.block_tokens] = encode(values, case.kv_dtype)
    q_values = random.standard_normal((len(context), case.num_q_heads, case.head_dim)) * 2
    q = encode(q_values, case.exchange_dtype)
    scale = case.scale or case.head_dim**-0.5
    out = cpu_kernels.decode_attention(q, pool, tables, context, scale, case.window, instruction_set, num_threads)
    assert out.dtype == q.dtype
    want = attention(decode(q), decode(pool), tables, context, scale, case.window)
    np.testing.assert_allclose(decode(out), want, rtol=0, atol=TOLERANCE[case.exchange_dtype])


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("block_tokens", [1, 5, 16, 24, 64])
def test_lengths_around_block_and_tile_edges(instruction_set: str, block_tokens: int, num_threads: int) -> None:
    lengths = sorted({1, 2, 7, 8, 9, 15, 16, 17, 31, 33, block_tokens, block_tokens + 1, 3 * block_tokens + 2, 700})
    run_and_compare(Case(block_tokens=block_tokens), lengths, instruction_set, num_threads, seed=1)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2), (7, 1), (9, 3), (32, 8), (16, 1), (48, 2)])
def test_every_head_ratio(instruction_set: str, heads: tuple[int, int]) -> None:
    run_and_compare(Case(*heads), [1, 50, 129], instruction_set, 1, seed=2)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 20, 32, 33, 64, 80, 96, 128, 192, 255, 256])
def test_every_head_dimension(instruction_set: str, head_dim: int, kv_dtype: str) -> None:
    run_and_compare(Case(head_dim=head_dim, kv_dtype=kv_dtype), [3, 40], instruction_set, 1, seed=3)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("exchange_dtype", DTYPES)
def test_every_type(instruction_set: str, kv_dtype: str, exchange_dtype: str) -> None:
    case = Case(num_q_heads=6, kv_dtype=kv_dtype, exchange_dtype=exchange_dtype)
    run_and_compare(case, [1, 16, 90], instruction_set, 1, seed=4)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("window", [1, 15, 16, 100, 5000])
def test_sliding_window(instruction_set: str, window: int, num_threads: int) -> None:
    run_and_compare(Case(window=window), [1, 15, 16, 17, 116, 1999], instruction_set, num_threads, seed=5)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_long_contexts_are_cut_into_spans_and_merged(instruction_set: str, kv_dtype: str) -> None:
    case = Case(num_q_heads=6, num_kv_heads=1, head_dim=72, kv_dtype=kv_dtype)
    run_and_compare(case, [5000, 3, 1111], instruction_set, 3, seed=6)


def test_scores_far_apart_neither_overflow_nor_vanish(instruction_set: str) -> None:
    # Scores up to some thousands, far past where exp() overflows; the maximum comes anywhere.
    run_and_compare(Case(scale=50.0), [1, 33, 600], instruction_set, 2, seed=7)


def test_a_token_that_is_seen_alone_is_returned(instruction_set: str) -> None:
    pool = np.full((1, 2, 1, 4, 16), np.nan, np.float32)
    pool[0, 0, 0, 0] = 1.0
    pool[0, 1, 0, 0] = np.arange(16)
    q = np.full((1, 3, 16), 100.0, np.float32)
    tables, context = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    out = cpu_kernels.decode_attention(q, pool, tables, context, 1.0, 0, instruction_set, 1)
    assert out.tolist() == [[list(range(16))] * 3]


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_shapes(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.integers(1, 5))
    case = Case(
        num_q_heads=num_kv_heads * data.draw(st.integers(1, 17)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.integers(1, 256)),
        block_tokens=data.draw(st.integers(1, 70)),
        window=data.draw(st.sampled_from([0, 0, 1, 13, 64, 300])),
        kv_dtype=data.draw(st.sampled_from(DTYPES)),
        exchange_dtype=data.draw(st.sampled_from(DTYPES)),
    )
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))
    run_and_compare(case, lengths, data.draw(st.sampled_from(INSTRUCTION_SETS)), data.draw(st.integers(1, 3)), seed=8)


def call(q: Array, pool: Array, tables: Array, context: Array, name: str = "auto", threads: int = 1) -> Array:
    return cpu_kernels.decode_attention(q, pool, tables, context, 1.0, 0, name, threads)


def test_what_does_not_fit_is_refused() -> None:
    q, pool = np.ones((1, 2, 16), np.float32), np.ones((4, 2, 1, 8, 16), np.float32)
    tables, context = np.array([[0, 3]], np.int32), np.array([9], np.int32)
    assert call(q, pool, tables, context).shape == q.shape
    with pytest.raises(PlaneError, match="block 4 of 4"):
        call(q, pool, np.array([[0, 4]], np.int32), context)
    with pytest.raises(PlaneError, match="block -1 of 4"):
        call(q, pool, np.array([[-1, 0]], np.int32), context)
    with pytest.raises(PlaneError, match="context of 17 tokens beside a table of 2 blocks"):
        call(q, pool, tables, np.array([17], np.int32))
    with pytest.raises(PlaneError, match="context of 0 tokens"):
        call(q, pool, tables, np.array([0], np.int32))
    with pytest.raises(PlaneError, match="must divide"):
        call(q, np.ones((4, 2, 3, 8, 16), np.float32), tables, context)
    with pytest.raises(ValueError, match="does not fit q"):
        call(q, np.ones((4, 2, 1, 8, 24), np.float32), tables, context)
    with pytest.raises(ValueError, match="number of sequences"):
        call(q, pool, tables, np.array([9, 9], np.int32))
    with pytest.raises(ValueError, match="num_threads"):
        call(q, pool, tables, context, threads=0)
    with pytest.raises(ValueError, match='"sse9" does not run here; these do: scalar'):
        call(q, pool, tables, context, "sse9")
    with pytest.raises(TypeError, match="float32, float16"):
        call(q.astype(np.float64), pool, tables, context)


def test_auto_is_the_fastest() -> None:
    assert INSTRUCTION_SETS[0] == "scalar"
    assert cpu_kernels.choose_instruction_set("auto") == INSTRUCTION_SETS[-1]
    assert cpu_kernels.choose_instruction_set("scalar") == "scalar"
