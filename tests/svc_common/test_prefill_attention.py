"""Each kernel against the formula in float64: prefill attention."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_attention import attention, decode, encode, to_pool
from support.kernels import DTYPES, EACH_INSTRUCTION_SET, KV_DTYPES, RUNNABLE, Case

from svc_common.cpu_kernels import Attention, PrefillWork, ThreadPool, argmax_rows
from svc_common.tensor_plane import PlaneError


def run_and_compare(
    case: Case, start: int, num_tokens: int, instruction_set: str, num_threads: int = 1, seed: int = 0
) -> None:
    """Poisons unused blocks and the unused tail of the last."""
    random = np.random.default_rng(seed)
    end = start + num_tokens
    table = random.permutation(-(-end // case.block_tokens) + 3).astype(np.int32)
    values = np.full((len(table), 2, case.num_kv_heads, case.block_tokens, case.head_dim), np.nan)
    positions = np.arange(end)
    tokens = random.standard_normal((end, 2, case.num_kv_heads, case.head_dim))
    values[table[positions // case.block_tokens], :, :, positions % case.block_tokens] = tokens
    layer = to_pool(values, case.kv_dtype)
    # q and out as parts of wider rows.
    q = encode(random.standard_normal((num_tokens, case.num_q_heads + 2, case.head_dim)) * 2, case.exchange_dtype)
    out = np.zeros_like(q)
    work = PrefillWork(case.attention(instruction_set, num_threads), start, num_tokens, table[:-3])
    work.run(q[:, : case.num_q_heads], layer.blocks, out[:, : case.num_q_heads], layer.scales)
    assert not out[:, case.num_q_heads :].any()
    want = attention(
        decode(q[:, : case.num_q_heads]),
        layer.values(case.head_dim),
        np.tile(table, (num_tokens, 1)),
        np.arange(start, end) + 1,
        case.softmax_scale,
        case.window,
        case.softcap,
    )
    np.testing.assert_allclose(decode(out[:, : case.num_q_heads]), want, rtol=0, atol=case.atol)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("start", "num_tokens"), [(0, 1), (0, 5), (0, 16), (0, 63), (0, 64), (0, 65), (1, 1), (63, 2), (64, 70), (150, 33)]
)
def test_chunks_around_edges(instruction_set: str, start: int, num_tokens: int, kv_dtype: str) -> None:
    run_and_compare(Case(num_q_heads=6, kv_dtype=kv_dtype), start, num_tokens, instruction_set)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (9, 3), (8, 2), (100, 1)])
def test_every_head_ratio(instruction_set: str, heads: tuple[int, int]) -> None:
    run_and_compare(Case(*heads, head_dim=32), 20, 50, instruction_set, num_threads=2)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("exchange_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 33, 96, 256])
def test_every_type_and_dimension(instruction_set: str, head_dim: int, kv_dtype: str, exchange_dtype: str) -> None:
    case = Case(head_dim=head_dim, kv_dtype=kv_dtype, exchange_dtype=exchange_dtype)
    run_and_compare(case, 7, 20, instruction_set)


@EACH_INSTRUCTION_SET
@pytest.mark.parametrize("window", [1, 16, 63, 64, 100, 5000])
def test_sliding_window(instruction_set: str, window: int) -> None:
    run_and_compare(Case(window=window, head_dim=32), 90, 150, instruction_set)


@EACH_INSTRUCTION_SET
def test_softcap_and_large_scores(instruction_set: str) -> None:
    run_and_compare(Case(softcap=5.0, scale=3.0), 10, 90, instruction_set)
    run_and_compare(Case(scale=50.0), 10, 90, instruction_set)


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_shapes(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.integers(1, 3))
    case = Case(
        num_q_heads=num_kv_heads * data.draw(st.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.integers(1, 256)),
        block_tokens=data.draw(st.integers(1, 70)),
        window=data.draw(st.sampled_from([0, 0, 1, 13, 64, 300])),
        softcap=data.draw(st.sampled_from([0.0, 0.0, 20.0])),
        kv_dtype=data.draw(st.sampled_from(KV_DTYPES)),
        exchange_dtype=data.draw(st.sampled_from(DTYPES)),
    )
    start, num_tokens = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 120))
    run_and_compare(case, start, num_tokens, data.draw(st.sampled_from(RUNNABLE)), data.draw(st.integers(1, 3)))


def test_what_does_not_fit_is_refused() -> None:
    attend = Case(num_q_heads=2, num_kv_heads=1, head_dim=16, block_tokens=8).attention("auto", 1)
    table = np.array([0, 3], np.int32)
    with pytest.raises(ValueError, match="start must not be negative"):
        PrefillWork(attend, -1, 1, table)
    with pytest.raises(ValueError, match="num_tokens at least 1"):
        PrefillWork(attend, 0, 0, table)
    with pytest.raises(PlaneError, match="context of 17 tokens beside a table of 2 blocks"):
        PrefillWork(attend, 7, 10, table)
    work = PrefillWork(attend, 0, 9, table)
    q, layer = np.ones((9, 2, 16), np.float32), np.ones((4, 2, 1, 128), np.float32)
    with pytest.raises(ValueError, match="too few blocks"):
        work.run(q, layer[:3], q.copy())
    with pytest.raises(ValueError, match="q and out are not"):
        work.run(q[:8], layer, q.copy())


def test_threads_that_come_after_the_work_was_prepared_have_room_too() -> None:
    """Another user of the pool may start them between two layers."""
    threads = ThreadPool(1)
    attend = Attention(
        num_q_heads=4,
        num_kv_heads=4,
        head_dim=32,
        block_tokens=16,
        kv_dtype="fp32",
        exchange_dtype="fp32",
        softmax_scale=32**-0.5,
        sliding_window=0,
        softcap=0.0,
        instruction_set="auto",
        threads=threads,
    )
    work = PrefillWork(attend, 0, 256, np.arange(16, dtype=np.int32))
    q = np.random.default_rng(0).standard_normal((256, 4, 32)).astype(np.float32)
    layer = np.ones((16, 2, 4, 16 * 32), np.float32)
    alone, together = np.zeros_like(q), np.zeros_like(q)
    work.run(q, layer, alone)
    threads.num_threads = 4
    argmax_rows(np.zeros((1, 32), np.float32), np.zeros(1, np.int64), np.zeros(1, np.float32), threads, "auto")
    work.run(q, layer, together)
    np.testing.assert_array_equal(together, alone)


def test_a_pool_has_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="num_threads must be at least 1"):
        ThreadPool(0)
    threads = ThreadPool(1)
    with pytest.raises(ValueError, match="num_threads must be at least 1"):
        threads.num_threads = 0
