"""Each kernel against the formula in float64: decode attention."""

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_attention import TOLERANCE, Array, Pool, attention, decode, encode, to_pool
from support.kernels import DTYPES, EACH_INSTRUCTION_SET, KV_DTYPES, RUNNABLE, Case

from svc_common.cpu_kernels import DecodeWork, choose_instruction_set
from svc_common.tensor_plane import PlaneError

Inputs = tuple[Array, Pool, Array, Array]


def fill(case: Case, context_tokens: list[int], seed: int) -> Inputs:
    """q, layer, tables, context; poison in whatever is not to be read: unused blocks, unused tails of used ones."""
    random = np.random.default_rng(seed)
    context = np.array(context_tokens, np.int32)
    num_blocks = -(-context // case.block_tokens)
    ids = random.permutation(int(num_blocks.sum()) + 3).astype(np.int32)
    tables = np.full((len(context), int(num_blocks.max())), -1, np.int32)
    layer = np.full((len(ids), 2, case.num_kv_heads, case.block_tokens, case.head_dim), np.nan)
    first = 0
    for row, length, count in zip(tables, context, num_blocks, strict=True):
        row[:count] = ids[first : first + count]
        first += count
        positions = np.arange(length)
        values = random.standard_normal((length, 2, case.num_kv_heads, case.head_dim))
        layer[row[positions // case.block_tokens], :, :, positions % case.block_tokens] = values
    q = encode(random.standard_normal((len(context), case.num_q_heads, case.head_dim)) * 2, case.exchange_dtype)
    return q, to_pool(layer, case.kv_dtype), tables, context


def run(case: Case, inputs: Inputs, instruction_set: str, num_threads: int = 1) -> Array:
    q, layer, tables, context = inputs
    out = np.empty_like(q)
    work = DecodeWork(case.attention(instruction_set, num_threads), context, tables)
    for _ in range(2):  # Work is run once per layer.
        out[:] = 0
        work.run(q, layer.blocks, out, layer.scales)
    return out


def run_and_compare(case: Case, context_tokens: list[int], instruction_set: str, num_threads: int, seed: int) -> None:
    inputs = q, layer, tables, context = fill(case, context_tokens, seed)
    out = run(case, inputs, instruction_set, num_threads)
    want = attention(
        decode(q), layer.values(case.head_dim), tables, context, case.softmax_scale, case.window, case.softcap
    )
    np.testing.assert_allclose(decode(out), want, rtol=0, atol=case.atol)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_tokens", [1, 5, 16, 24, 64])
def test_lengths_around_block_and_tile_edges(
    instruction_set: str, block_tokens: int, kv_dtype: str, num_threads: int
) -> None:
    lengths = sorted({1, 2, 7, 8, 9, 15, 16, 17, 31, 33, block_tokens, block_tokens + 1, 3 * block_tokens + 2, 700})
    exchange_dtype = "fp32" if kv_dtype == "int8" else kv_dtype
    case = Case(block_tokens=block_tokens, kv_dtype=kv_dtype, exchange_dtype=exchange_dtype)
    run_and_compare(case, lengths, instruction_set, num_threads, seed=1)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("dtypes", [*zip(DTYPES, DTYPES, strict=True), ("int8", "bf16")])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2), (7, 1), (9, 3), (32, 8), (16, 1), (48, 2)])
def test_every_head_ratio(instruction_set: str, heads: tuple[int, int], dtypes: tuple[str, str]) -> None:
    case = Case(*heads, kv_dtype=dtypes[0], exchange_dtype=dtypes[1])
    run_and_compare(case, [1, 50, 129], instruction_set, 1, seed=2)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize(
    "dtypes", [("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("int8", "fp32")]
)
@pytest.mark.parametrize("head_dim", [1, 8, 20, 32, 33, 64, 80, 96, 128, 192, 255, 256])
def test_every_head_dimension(instruction_set: str, head_dim: int, dtypes: tuple[str, str]) -> None:
    case = Case(head_dim=head_dim, kv_dtype=dtypes[0], exchange_dtype=dtypes[1])
    run_and_compare(case, [3, 40], instruction_set, 1, seed=3)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("exchange_dtype", DTYPES)
def test_every_type(instruction_set: str, kv_dtype: str, exchange_dtype: str) -> None:
    case = Case(num_q_heads=6, kv_dtype=kv_dtype, exchange_dtype=exchange_dtype)
    run_and_compare(case, [1, 16, 90], instruction_set, 1, seed=4)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("window", [1, 15, 16, 100, 5000])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_sliding_window(instruction_set: str, kv_dtype: str, window: int, num_threads: int) -> None:
    case = Case(window=window, kv_dtype=kv_dtype)
    run_and_compare(case, [1, 15, 16, 17, 116, 1999], instruction_set, num_threads, seed=5)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_smaller_than_a_vector(instruction_set: str, kv_dtype: str) -> None:
    """Their pool ends where the memory does: the page behind it cannot be read."""
    case = Case(num_q_heads=1, num_kv_heads=1, head_dim=3, block_tokens=2, kv_dtype=kv_dtype)
    random = np.random.default_rng(11)
    q, layer = random.standard_normal((1, 1, 3)).astype(np.float32), to_pool(random.random((4, 2, 1, 2, 3)), kv_dtype)
    tables, context = np.array([[0, 2, 1, 3, 3]], np.int32), np.array([9], np.int32)
    memory = np.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), np.uint8)
    no_access = 0
    behind = ctypes.c_void_p(memory.ctypes.data + mmap.PAGESIZE)
    assert ctypes.CDLL(None).mprotect(behind, mmap.PAGESIZE, no_access) == 0
    blocks = layer.blocks
    at_end = memory[mmap.PAGESIZE - blocks.nbytes : mmap.PAGESIZE].view(blocks.dtype).reshape(blocks.shape)
    at_end[:] = blocks
    out = run(case, (q, Pool(at_end, layer.scales), tables, context), instruction_set)
    want = attention(decode(q), layer.values(3), tables, context, case.softmax_scale, 0)
    np.testing.assert_allclose(out, want, rtol=0, atol=case.atol)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_softcap(instruction_set: str, kv_dtype: str, softcap: float) -> None:
    case = Case(softcap=softcap, scale=3.0, kv_dtype=kv_dtype)
    run_and_compare(case, [1, 15, 500], instruction_set, 1, seed=9)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_long_contexts_are_cut_into_spans_and_merged(instruction_set: str, kv_dtype: str) -> None:
    case = Case(num_q_heads=6, num_kv_heads=1, head_dim=72, kv_dtype=kv_dtype)
    run_and_compare(case, [5000, 3, 1111], instruction_set, 3, seed=6)


@EACH_INSTRUCTION_SET
def test_scores_far_apart_neither_overflow_nor_vanish(instruction_set: str) -> None:
    # Scores up to some thousands, far past where exp() overflows; the maximum comes anywhere.
    run_and_compare(Case(scale=50.0), [1, 33, 600], instruction_set, 2, seed=7)


@EACH_INSTRUCTION_SET
def test_a_token_that_is_seen_alone_is_returned(instruction_set: str) -> None:
    case = Case(num_q_heads=3, num_kv_heads=1, head_dim=16, block_tokens=4, scale=1.0)
    values = np.full((1, 2, 1, 4, 16), np.nan)
    values[0, :, 0, 0] = [[1.0] * 16, range(16)]
    q = np.full((1, 3, 16), 100.0, np.float32)
    out = run(case, (q, to_pool(values, "fp32"), np.zeros((1, 1), np.int32), np.ones(1, np.int32)), instruction_set)
    assert out.tolist() == [[list(range(16))] * 3]


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [20, 3000])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["some key", "all keys", "value"])
def test_nan_and_infinity_do_what_the_formula_does(
    instruction_set: str, dtype: str, length: int, special: float, place: str
) -> None:
    """As softmax by torch or numpy would: a weight of 0 hides nothing, scores of -infinity alone are no number."""
    case = Case(num_q_heads=2, num_kv_heads=1, head_dim=32, kv_dtype=dtype, exchange_dtype=dtype)
    q, layer, tables, context = fill(case, [length], seed=10)
    q = encode(np.abs(decode(q)) + 0.1, dtype)  # An infinite key's scores have its sign.
    values = layer.values(case.head_dim)
    block, offset = tables[0, 7 // case.block_tokens], 7 % case.block_tokens
    if place == "some key":
        values[block, 0, 0, offset, 5] = special
    elif place == "all keys":
        values[:, 0, 0, :, 5] = special
    else:
        values[block, 1, 0, offset, 5] = special
    layer = to_pool(values, dtype)
    out = decode(run(case, (q, layer, tables, context), instruction_set, 2))
    with np.errstate(invalid="ignore"):
        want = attention(decode(q), layer.values(32), tables, context, case.softmax_scale, 0)
    np.testing.assert_allclose(out, want, rtol=0, atol=TOLERANCE[dtype])


@given(data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_random_shapes(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.integers(1, 5))
    case = Case(
        num_q_heads=num_kv_heads * data.draw(st.integers(1, 17)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.integers(1, 256)),
        block_tokens=data.draw(st.integers(1, 70)),
        window=data.draw(st.sampled_from([0, 0, 1, 13, 64, 300])),
        softcap=data.draw(st.sampled_from([0.0, 0.0, 20.0])),
        kv_dtype=data.draw(st.sampled_from(KV_DTYPES)),
        exchange_dtype=data.draw(st.sampled_from(DTYPES)),
    )
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))
    run_and_compare(case, lengths, data.draw(st.sampled_from(RUNNABLE)), data.draw(st.integers(1, 3)), seed=8)


def test_what_does_not_fit_is_refused() -> None:
    case = Case(num_q_heads=2, num_kv_heads=1, head_dim=16, block_tokens=8)
    attend = case.attention("auto", 1)
    q, layer = np.ones((1, 2, 16), np.float32), np.ones((4, 2, 1, 128), np.float32)
    out = np.empty_like(q)
    tables, context = np.array([[0, 3]], np.int32), np.array([9], np.int32)
    work = DecodeWork(attend, context, tables)
    work.run(q, layer, out)
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)
    with pytest.raises(PlaneError, match="block -1 of"):
        DecodeWork(attend, context, np.array([[-1, 0]], np.int32))
    with pytest.raises(PlaneError, match="context of 17 tokens beside a table of 2 blocks"):
        DecodeWork(attend, np.array([17], np.int32), tables)
    with pytest.raises(PlaneError, match="context of 0 tokens"):
        DecodeWork(attend, np.array([0], np.int32), tables)
    with pytest.raises(ValueError, match="number of sequences"):
        DecodeWork(attend, np.array([9, 9], np.int32), tables)
    with pytest.raises(PlaneError, match="must divide"):
        Case(num_q_heads=2, num_kv_heads=3).attention("auto", 1)
    with pytest.raises(PlaneError, match="softcap must not be negative"):
        Case(softcap=-1.0).attention("auto", 1)
    with pytest.raises(ValueError, match='"sse9" does not run here; these do: scalar'):
        case.attention("sse9", 1)
    with pytest.raises(ValueError, match="layer is not"):
        work.run(q, np.ones((4, 2, 1, 64), np.float32), out)
    with pytest.raises(ValueError, match="too few blocks"):
        work.run(q, layer[:3], out)  # block 3 is used
    with pytest.raises(ValueError, match="q and out are not"):
        work.run(np.ones((2, 2, 16), np.float32), layer, out)
    with pytest.raises(ValueError, match="not contiguous"):
        work.run(q, layer, np.empty((1, 16, 2), np.float32).swapaxes(1, 2))
    with pytest.raises(ValueError, match="exchange type"):
        work.run(q.astype(np.float16), layer, out)
    with pytest.raises(TypeError, match="float32, float16"):
        work.run(q.astype(np.float64), layer, out)


def test_auto_is_the_fastest() -> None:
    assert RUNNABLE[0] == "scalar"
    assert choose_instruction_set("auto") == RUNNABLE[-1]
    assert choose_instruction_set("scalar") == "scalar"
