"""Packed matrix products, by each instruction set that runs here, against the formula in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_attention import decode, encode

from svc_common.cpu_kernels import PackedLinear, ThreadPool, argmax_rows, runnable_linear_instruction_sets

Array = npt.NDArray[np.float32]

INSTRUCTION_SETS = runnable_linear_instruction_sets()
DTYPES = ["fp32", "fp16", "bf16"]
THREADS = [ThreadPool(1), ThreadPool(3)]
# Around the rows of a tile and of a block, the columns of a panel, and the depth of a span.
ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25, 70, 97, 200]
COLUMNS = [1, 15, 16, 17, 31, 32, 33, 64, 100]
DEPTHS = [1, 2, 3, 48, 577, 640, 641, 1301]


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def multiply(
    linear: PackedLinear, rows: Array, num_outputs: int, residual: Array | None = None, threads: int = 1
) -> Array:
    out = np.full((len(rows), num_outputs), np.nan, np.float32)
    linear.multiply(rows, residual, out, THREADS[threads])
    return out


def as_read(rows: Array, dtype: str, name: str) -> npt.NDArray[np.float64]:
    """The rows that a product with weights of this type reads."""
    return decode(encode(rows, dtype if name == "avx512_bf16" and dtype == "bf16" else "fp32"))


def silu(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


GATES: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {"silu_gated": silu, "gelu_tanh_gated": gelu_tanh}


def check(
    num_rows: int, columns: int, depth: int, dtype: str, name: str, bias: bool, residual: bool, threads: int = 1
) -> None:
    """Largest error: each of `depth` additions rounds to fp32."""
    weights, rows = noise(columns, depth, seed=1), noise(num_rows, depth, seed=2)
    added = noise(columns, seed=3) if bias else None
    beside = noise(num_rows, columns, seed=4) if residual else None
    actual = multiply(PackedLinear(weights, added, dtype, "none", name), rows, columns, beside, threads)
    want = as_read(rows, dtype, name) @ decode(encode(weights, dtype)).T
    want += (0 if added is None else added) + (0 if beside is None else beside)
    np.testing.assert_allclose(actual, want, rtol=0, atol=2e-6 * depth**0.5 * max(1, depth**0.5 / 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_every_number_of_rows(instruction_set: str, num_rows: int, dtype: str) -> None:
    check(num_rows, 100, 67, dtype, instruction_set, bias=True, residual=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_number_of_columns(instruction_set: str, columns: int, dtype: str) -> None:
    check(5, columns, 40, dtype, instruction_set, bias=True, residual=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_depth(instruction_set: str, depth: int, dtype: str) -> None:
    check(14, 33, depth, dtype, instruction_set, bias=False, residual=True)


@pytest.mark.parametrize("num_rows", [1, 8, 120])
def test_threads_share_a_product(instruction_set: str, num_rows: int) -> None:
    check(num_rows, 1000, 576, "fp32", instruction_set, bias=True, residual=True, threads=1)
    check(num_rows, 1000, 576, "fp32", instruction_set, bias=True, residual=True, threads=0)


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_shapes(data: st.DataObject) -> None:
    check(
        data.draw(st.integers(1, 70)),
        data.draw(st.integers(1, 150)),
        data.draw(st.integers(1, 900)),
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from(INSTRUCTION_SETS)),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.integers(0, 1)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 3), (13, 16, 20), (7, 50, 31), (100, 96, 64)])
@pytest.mark.parametrize("activation", GATES)
def test_gates_multiply_what_they_gate(
    instruction_set: str, activation: str, shape: tuple[int, int, int], dtype: str
) -> None:
    num_rows, outputs, depth = shape
    weights, bias, rows = noise(2 * outputs, depth), noise(2 * outputs), noise(num_rows, depth)
    actual = multiply(PackedLinear(weights, bias, dtype, activation, instruction_set), rows, outputs)
    gate, up = np.split(as_read(rows, dtype, instruction_set) @ decode(encode(weights, dtype)).T + bias, 2, axis=1)
    np.testing.assert_allclose(actual, GATES[activation](gate) * up, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_relu(instruction_set: str, columns: int, dtype: str) -> None:
    weights, bias, rows = noise(columns, 37), noise(columns), noise(14, 37)
    rows[3, 5] = np.nan
    actual = multiply(PackedLinear(weights, bias, dtype, "relu", instruction_set), rows, columns)
    want = as_read(rows, dtype, instruction_set) @ decode(encode(weights, dtype)).T + bias
    assert np.isnan(actual[3]).all()
    np.testing.assert_allclose(actual, np.maximum(want, 0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", GATES)
def test_gates_far_from_zero_neither_overflow_nor_vanish(instruction_set: str, activation: str) -> None:
    gates = np.array([-1e30, -200.0, -87.0, -20.0, -1.0, 0.0, 1e-30, 1.0, 20.0, 89.0, 1e30], np.float32)
    weights = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    rows = np.stack([gates, np.ones_like(gates)], axis=1)
    actual = multiply(PackedLinear(weights, None, "fp32", activation, instruction_set), rows, 1)[:, 0]
    with np.errstate(over="ignore"):
        want = GATES[activation](gates.astype(np.float64))
    np.testing.assert_allclose(actual, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_whatever_its_neighbours(instruction_set: str, dtype: str) -> None:
    linear = PackedLinear(noise(200, 1301), noise(200), dtype, "none", instruction_set)
    rows = noise(113, 1301)
    together = multiply(linear, rows, 200)
    for start, end in ((0, 1), (1, 3), (3, 6), (6, 11), (11, 24), (24, 70), (70, 113), (112, 113)):
        for threads in (0, 1):
            apart = multiply(linear, rows[start:end], 200, threads=threads)
            assert np.array_equal(apart, together[start:end])


def test_residual_may_be_added_in_place(instruction_set: str) -> None:
    weights, rows, hidden = noise(40, 50), noise(9, 50), noise(9, 40)
    linear = PackedLinear(weights, None, "fp32", "none", instruction_set)
    want = multiply(linear, rows, 40, hidden)
    linear.multiply(rows, hidden, hidden, THREADS[0])
    assert np.array_equal(hidden, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_pass_to_their_row_and_column_only(instruction_set: str, dtype: str) -> None:
    weights, rows = np.abs(noise(70, 31)) + 0.1, np.abs(noise(15, 31))
    weights[40, 30], rows[3, 2], rows[7, 5] = np.nan, np.inf, np.nan
    actual = multiply(PackedLinear(weights, None, dtype, "none", instruction_set), rows, 70)
    want = np.zeros((15, 70))
    want[3], want[7], want[:, 40] = np.inf, np.nan, np.nan
    assert np.array_equal(np.where(np.isfinite(actual), 0, actual), want, equal_nan=True)


@pytest.mark.parametrize("width", [1, 5, 16, 511, 512, 513, 1040, 49152])
def test_argmax_finds_the_first_of_the_largest(instruction_set: str, width: int) -> None:
    rows = np.round(noise(9, width) * 2)
    rows[1], rows[2] = -np.inf, np.float32(3.0)
    rows[3, width // 2] = np.inf
    rows[4, -1] = np.nan
    rows[5, 0], rows[5, -1] = np.nan, 100.0
    rows[6] = -np.abs(rows[6]) - 5
    rows[7, : width - 1] = -np.inf
    places, maxima = np.full(9, -1, np.int64), np.zeros(9, np.float32)
    for pool in THREADS:
        argmax_rows(rows, places, maxima, pool, instruction_set)
        np.testing.assert_array_equal(maxima, rows.max(axis=1))
        numbers = ~np.isnan(maxima)
        np.testing.assert_array_equal(places[numbers], rows.argmax(axis=1)[numbers])


def test_argmax_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit the rows"):
        argmax_rows(noise(2, 3), np.zeros(3, np.int64), np.zeros(2, np.float32), THREADS[0], "auto")


def test_bytes_count_the_padding_of_panels() -> None:
    """A panel of the scalar set has 16 columns."""
    assert PackedLinear(noise(33, 10), None, "fp32", "none", "scalar").num_bytes == 48 * 10 * 4
    # An odd depth is padded in bf16, and a panel to whole cache lines; the bias is fp32.
    assert PackedLinear(noise(33, 9), noise(33), "bf16", "none", "scalar").num_bytes == 48 * 10 * 2 + 48 * 4


def test_what_does_not_fit_is_refused() -> None:
    linear, out = PackedLinear(noise(8, 4), None, "fp32", "none", "auto"), np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="rows do not fit"):
        linear.multiply(noise(2, 5), None, out, THREADS[0])
    with pytest.raises(ValueError, match="out does not fit"):
        linear.multiply(noise(3, 4), None, out, THREADS[0])
    with pytest.raises(ValueError, match="residual does not fit"):
        linear.multiply(noise(2, 4), noise(2, 7), out, THREADS[0])
    with pytest.raises(ValueError, match='"sse9" does not run here; these do: scalar'):
        PackedLinear(noise(8, 4), None, "fp32", "none", "sse9")
    with pytest.raises(ValueError, match="bias does not fit"):
        PackedLinear(noise(8, 4), noise(7), "fp32", "none", "auto")
    with pytest.raises(ValueError, match="fp32, fp16, bf16, int8 or int4"):
        PackedLinear(noise(8, 4), None, "fp8", "none", "auto")
    with pytest.raises(ValueError, match="even number of rows"):
        PackedLinear(noise(7, 4), None, "fp32", "silu_gated", "auto")
    with pytest.raises(ValueError, match="the activation is none, relu, silu_gated or gelu_tanh_gated"):
        PackedLinear(noise(8, 4), None, "fp32", "tanh", "auto")
    with pytest.raises(ValueError, match="takes no residual"):
        PackedLinear(noise(16, 4), None, "fp32", "silu_gated", "auto").multiply(noise(2, 4), out, out, THREADS[0])
