"""Products with int8 and int4 weights, by each instruction set that runs here: the rounding, and what it is off by."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.quantised import GROUP, Array, Wide, as_int8, grouped, held, int8_scales, rows_as_int16

from svc_common.cpu_kernels import PackedLinear, ThreadPool, runnable_linear_instruction_sets

INSTRUCTION_SETS = runnable_linear_instruction_sets()
DTYPES = ["int8", "int4"]
THREADS = [ThreadPool(1), ThreadPool(3)]


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def multiply(linear: PackedLinear, rows: Array, outputs: int, residual: Array | None = None, threads: int = 1) -> Array:
    out = np.full((len(rows), outputs), np.nan, np.float32)
    linear.multiply(rows, residual, out, THREADS[threads])
    return out


def product(weights: Array, rows: Array, dtype: str, instruction_set: str) -> tuple[Wide, Wide]:
    """rows . weights^T of numbers as they are read, and how far fp32's additions may be off: [n, columns] each."""
    wide, read = held(weights, dtype, instruction_set).astype(np.float64), rows_as_int16(rows, dtype)
    # int4's minima and multiples of scales are added one by one, and of opposite signs.
    spread = np.abs(grouped(weights, GROUP[dtype])).max(-1).max(-1)
    slack = np.abs(read) @ np.abs(wide).T + (np.abs(read).sum(-1)[:, None] * spread if dtype == "int4" else 0)
    return read @ wide.T, 1e-6 * slack + 1e-6


def check(num_rows: int, columns: int, depth: int, dtype: str, name: str, threads: int = 1) -> None:
    weights, rows = noise(columns, depth, seed=1), noise(num_rows, depth, seed=2)
    bias, residual = noise(columns, seed=3), noise(num_rows, columns, seed=4)
    actual = multiply(PackedLinear(weights, bias, dtype, "none", name), rows, columns, residual, threads)
    want, slack = product(weights, rows, dtype, name)
    assert (np.abs(actual - (want + bias + residual)) <= slack + 4e-7 * (1 + np.abs(want))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 97])
def test_every_number_of_rows(instruction_set: str, num_rows: int, dtype: str) -> None:
    check(num_rows, 70, 67, dtype, instruction_set)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 32, 33, 100])
def test_every_number_of_columns(instruction_set: str, columns: int, dtype: str) -> None:
    check(5, columns, 40, dtype, instruction_set)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 2, 3, 31, 32, 33, 63, 64, 65, 577, 640, 641, 1301])
def test_every_depth(instruction_set: str, depth: int, dtype: str) -> None:
    check(14, 33, depth, dtype, instruction_set)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_a_product(instruction_set: str, dtype: str) -> None:
    for threads in (0, 1):
        check(8, 1000, 576, dtype, instruction_set, threads)


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_shapes(data: st.DataObject) -> None:
    rows, columns, depth = data.draw(st.tuples(st.integers(1, 70), st.integers(1, 150), st.integers(1, 700)))
    check(rows, columns, depth, data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(INSTRUCTION_SETS)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_whatever_its_neighbours(instruction_set: str, dtype: str) -> None:
    linear = PackedLinear(noise(200, 1301), noise(200), dtype, "none", instruction_set)
    rows = noise(113, 1301)
    together = multiply(linear, rows, 200)
    for start, end in ((0, 1), (1, 3), (3, 6), (6, 11), (11, 24), (24, 70), (70, 113), (112, 113)):
        for threads in (0, 1):
            assert np.array_equal(multiply(linear, rows[start:end], 200, threads=threads), together[start:end])


def silu(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 3), (13, 16, 70), (7, 50, 31)])
@pytest.mark.parametrize(("activation", "gate"), [("silu_gated", silu), ("gelu_tanh_gated", gelu_tanh)])
def test_gates_multiply_what_they_gate(
    instruction_set: str,
    activation: str,
    gate: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    shape: tuple[int, int, int],
    dtype: str,
) -> None:
    num_rows, outputs, depth = shape
    weights, bias, rows = noise(2 * outputs, depth), noise(2 * outputs), noise(num_rows, depth)
    actual = multiply(PackedLinear(weights, bias, dtype, activation, instruction_set), rows, outputs)
    gates, up = np.split(product(weights, rows, dtype, instruction_set)[0] + bias, 2, axis=1)
    np.testing.assert_allclose(actual, gate(gates) * up, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu(instruction_set: str, dtype: str) -> None:
    weights, bias, rows = noise(33, 70), noise(33), noise(14, 70)
    actual = multiply(PackedLinear(weights, bias, dtype, "relu", instruction_set), rows, 33)
    want, slack = product(weights, rows, dtype, instruction_set)
    assert (np.abs(actual - np.maximum(want + bias, 0)) <= slack + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_holds_the_same_weights(instruction_set: str, dtype: str) -> None:
    weights = noise(40, 200) * 0.02
    np.testing.assert_allclose(held(weights, dtype, instruction_set), held(weights, dtype), rtol=4e-7, atol=2e-8)


def test_int8_is_the_formula(instruction_set: str) -> None:
    weights = noise(50, 300) * np.exp(3 * noise(50, 300, seed=9))
    np.testing.assert_allclose(held(weights, "int8", instruction_set), as_int8(weights), rtol=4e-7, atol=0)


GROUPS = st.builds(
    lambda numbers, shift, exponent: ((numbers + shift) * 2.0**exponent).astype(np.float32),
    hnp.arrays(np.float32, (2, 64), elements=st.floats(-1, 1, width=32)),
    st.sampled_from([0.0, 0.0, 0.5, -3.0]),
    st.integers(-9, 9),
)


@given(weights=GROUPS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_int8_is_off_by_at_most_half_a_step(weights: Array) -> None:
    """A step is 1 / 127 of the group's largest weight, and at most 1 / 128 more for the scale's rounding."""
    weights[np.abs(weights) < 1e-30] = 0
    scales = int8_scales(grouped(weights, 64))
    largest = np.abs(weights).max(-1, keepdims=True)
    assert (scales[:, 0] <= largest / 127 * (1 + 1 / 128) + 1e-38).all()
    assert (np.abs(held(weights, "int8") - weights) <= scales[:, 0] * 0.501).all()


@given(weights=GROUPS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_int4_is_no_worse_than_an_even_grid_over_the_range(weights: Array) -> None:
    """Half a step at most, in the root mean square, but for what fp16 takes from scale and minimum: the last of its 11
    bits, and among its smallest numbers 2**-25 from the minimum and from each of 15 steps."""
    groups = grouped(weights, 32).astype(np.float64)
    off = grouped(held(weights, "int4") - weights, 32).astype(np.float64)
    step = (groups.max(-1) - groups.min(-1)) / 15
    fp16 = np.abs(groups).max(-1) * 2.0**-10 + 16 * 2.0**-25
    assert (np.sqrt((off**2).mean(-1)) <= step / 2 * 1.001 + fp16).all()


def test_int4_of_weights_as_they_are_beats_the_even_grid() -> None:
    weights = noise(500, 32)
    span = np.ptp(weights, axis=1, keepdims=True)
    low = weights.min(1, keepdims=True)
    even = np.rint((weights - low) / span * 15) / 15 * span + low
    ours = held(weights, "int4")
    assert ((ours - weights) ** 2).mean() < 0.9 * ((even - weights) ** 2).mean()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_what_gguf_has_in_four_bits_stays_as_it_is(instruction_set: str, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    weights = gguf.quants.dequantize(gguf.quants.quantize(noise(64, 256) * 0.05, quantisation), quantisation)
    np.testing.assert_allclose(held(weights, "int4", instruction_set), weights, rtol=0, atol=2e-7 * 0.3)


def test_gguf_of_eight_bits_stays_within_half_a_step() -> None:
    quantisation = gguf.GGMLQuantizationType.Q8_0
    weights = gguf.quants.dequantize(gguf.quants.quantize(noise(64, 256) * 0.05, quantisation), quantisation)
    steps = int8_scales(grouped(weights, 64)).repeat(64, -1).reshape(64, 256)
    assert (np.abs(held(weights, "int8") - weights) <= 0.501 * steps).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_large_and_small_groups_keep_both(instruction_set: str, dtype: str) -> None:
    """Each group has its own scale: numbers 1e6 times larger elsewhere in the row take nothing from it."""
    weights, rows = noise(33, 128), noise(9, 128)
    weights[:, :64] = 0
    expected = multiply(PackedLinear(weights, None, dtype, "none", instruction_set), rows, 33)
    rows[:, :64] *= 1e6
    assert np.array_equal(multiply(PackedLinear(weights, None, dtype, "none", instruction_set), rows, 33), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_tiny_numbers_count_as_zero(instruction_set: str, dtype: str) -> None:
    weights, rows = noise(33, 64), noise(4, 64)
    weights[5], weights[6], rows[1], rows[2] = 0, 1e-38, 0, 1e-38
    actual = multiply(PackedLinear(weights, None, dtype, "none", instruction_set), rows, 33)
    assert not actual[1:3].any()
    assert not actual[:, 5:7].any()
    assert actual[0, 7] != 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_makes_its_row_and_column_nan(instruction_set: str, dtype: str) -> None:
    weights, rows = noise(70, 131), noise(15, 131)
    weights[40, 130], weights[41, 3], rows[3, 2], rows[7, 130], rows[8, 0] = np.nan, np.inf, np.inf, np.nan, -np.inf
    actual = multiply(PackedLinear(weights, None, dtype, "none", instruction_set), rows, 70)
    bad = np.zeros((15, 70), bool)
    bad[[3, 7, 8]] = True
    bad[:, [40, 41]] = True
    assert np.array_equal(np.isnan(actual), bad)
    assert np.isfinite(actual[~bad]).all()


def test_int4_beyond_fp16_is_nan_and_not_a_wrong_number() -> None:
    weights = noise(3, 32)
    weights[1, 4] = 70000.0
    actual = multiply(PackedLinear(weights, None, "int4", "none", "auto"), noise(2, 32), 3)
    assert np.array_equal(np.isnan(actual), [[False, True, False]] * 2)


def test_bytes(instruction_set: str) -> None:
    """A group of 64 in 66 bytes, a group of 32 in 20; panels of 16 or 32 columns."""
    columns = 32 if "avx512" in instruction_set else 16
    for dtype, group_bytes, depth in (("int8", 66, 128), ("int4", 20, 64)):
        linear = PackedLinear(noise(columns + 1, depth - 5), None, dtype, "none", instruction_set)
        assert linear.num_bytes == 2 * -(-2 * group_bytes * columns // 64) * 64
