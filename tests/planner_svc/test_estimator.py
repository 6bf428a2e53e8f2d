"""Hand-worked numbers, and what must hold for any table however noisy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_svc.estimator import (
    CohortLoad,
    DecodePoint,
    Factors,
    IterationLoad,
    LinearPoint,
    OperationTables,
    PrefillPoint,
    SubBatchLoad,
    TableEstimator,
)
from planner_svc.estimator.interpolation import Curve, Surface

SECONDS = st.floats(0, 1e3, allow_nan=False)
QUANTITY = st.integers(1, 200)


def test_curve_between_below_and_beyond_its_points():
    curve = Curve([(10, 1.0), (20, 3.0), (40, 4.0)])
    assert curve(10) == 1.0
    assert curve(15) == 2.0
    assert curve(30) == 3.5
    assert curve(1) == 1.0  # a fixed cost remains
    assert curve(60) == pytest.approx(5.0)  # 0.05 s a unit, as in the last segment


def test_curve_of_one_point_is_constant():
    assert [Curve([(8, 2.0)])(x) for x in (1, 8, 100)] == [2.0, 2.0, 2.0]


def test_a_disturbed_measurement_is_bounded_by_those_of_more_work():
    curve = Curve([(1, 5.0), (2, 4.0), (3, 6.0), (4, 5.5)])
    assert [curve(x) for x in (1, 2, 3, 4, 9)] == [4.0, 4.0, 5.5, 5.5, 5.5]
    surface = Surface([(1, 0, 1.0), (1, 9, 50.0), (2, 0, 40.0), (2, 9, 3.0), (3, 0, 2.0)])
    assert [surface(1, 0), surface(1, 9), surface(2, 0), surface(2, 9)] == [1.0, 3.0, 2.0, 3.0]
    assert surface(3, 9) == 3.0  # not measured: no less than less work


def test_surface_is_bilinear():
    surface = Surface([(1, 0, 1.0), (1, 10, 3.0), (3, 0, 2.0), (3, 10, 8.0)])
    assert surface(1, 5) == 2.0
    assert surface(3, 5) == 5.0
    assert surface(2, 5) == 3.5
    assert surface(2, 20) == pytest.approx((5.0 + 14.0) / 2)
    assert surface(4, 10) == pytest.approx(8.0 + 2.5)
    assert surface(0, 5) == 2.0


def test_surface_rows_may_be_measured_at_different_places():
    surface = Surface([(1, 0, 0.0), (1, 10, 10.0), (2, 5, 20.0), (2, 15, 40.0)])
    assert surface(1, 5) == 5.0
    assert surface(2, 10) == 30.0
    assert surface(1.5, 10) == 20.0
    assert surface(1, 15) == 15.0
    assert surface(2, 0) == 20.0


@given(st.lists(st.tuples(QUANTITY, SECONDS), min_size=1, max_size=8), QUANTITY, st.integers(0, 500))
def test_curve_never_falls(points, x, more):
    curve = Curve(points)
    assert 0 <= curve(x) <= curve(x + more) * (1 + 1e-9) + 1e-9


def test_surface_of_what_grows_with_the_square_of_x():
    """Tokens that see all before them, and half of their chunk: exact between points that lie far apart."""
    surface = Surface([(x, y, x * (y + x / 2)) for x in (4, 64) for y in (0, 100)], per_x=True)
    assert [surface(x, y) for x, y in ((4, 0), (16, 0), (32, 50), (64, 100))] == [8, 128, 32 * 66, 64 * 132]
    falling = Surface([(1, 0, 10.0), (3, 0, 12.0)], per_x=True)
    assert falling(2, 0) == 12.0  # not 2 * 7


@given(
    st.lists(st.tuples(QUANTITY, QUANTITY, SECONDS), min_size=1, max_size=12),
    QUANTITY,
    QUANTITY,
    st.integers(0, 300),
    st.integers(0, 300),
    st.booleans(),
)
def test_surface_never_falls_along_either_quantity(points, x, y, more_x, more_y, per_x):
    surface = Surface(points, per_x)
    value = surface(x, y)
    assert value >= 0
    assert surface(x + more_x, y) >= value * (1 - 1e-9) - 1e-9
    assert surface(x, y + more_y) >= value * (1 - 1e-9) - 1e-9


def tables(**changes) -> OperationTables:
    """2 ms of linear work up to 100 tokens and 10 us for each further one; attention by context token."""
    values = {
        "linear": (LinearPoint(1, 2e-3), LinearPoint(100, 2e-3), LinearPoint(200, 3e-3)),
        "prefill": tuple(PrefillPoint(c, p, 1e-6 * c * (1 + p)) for c in (1, 100) for p in (0, 100)),
        "gpu_decode": tuple(DecodePoint(n, n * mean, 1e-6 * n * mean) for n in (1, 10) for mean in (10, 1000)),
        "cpu_decode": tuple(DecodePoint(n, n * mean, 1e-5 * n * mean) for n in (1, 10) for mean in (10, 1000)),
        "head": (LinearPoint(1, 1e-3), LinearPoint(11, 2e-3)),
        "swap_bytes_per_s": 1e9,
        "iteration_s": 5e-4,
    }
    return OperationTables(**(values | changes))


def test_operations_come_from_their_tables():
    estimator = TableEstimator(tables(), num_layers=4)
    assert estimator.linear_s(50) == pytest.approx(2e-3)
    assert estimator.linear_s(400) == pytest.approx(5e-3)
    assert estimator.prefill_s(50, 100) == pytest.approx(50e-6 * 101)
    assert estimator.gpu_decode_s(4, 400) == pytest.approx(4e-4)
    assert estimator.cpu_decode_s(4, 2000) == pytest.approx(2e-2)
    assert estimator.cpu_decode_s(20, 40_000) == pytest.approx(0.4)  # beyond the table on both sides
    assert estimator.head_s(6) == pytest.approx(1.5e-3)
    assert estimator.swap_s(2 * 10**6) == pytest.approx(2e-3)


def test_no_work_takes_no_time():
    estimator = TableEstimator(tables(), num_layers=4)
    operations = (
        estimator.linear_s(0),
        estimator.prefill_s(0, 10),
        estimator.gpu_decode_s(0, 0),
        estimator.cpu_decode_s(0, 0),
        estimator.head_s(0),
        estimator.swap_s(0),
    )
    assert operations == (0.0,) * 6
    assert estimator.iteration_s(IterationLoad(SubBatchLoad())) == pytest.approx(5e-4)


def test_gpu_only_iteration():
    estimator = TableEstimator(tables(), num_layers=4)
    load = SubBatchLoad(prefill_chunks=((50, 0), (46, 100)), num_gpu_decodes=4, gpu_context_tokens=400, num_outputs=6)
    layer_s = 2e-3 + 50e-6 + 46e-6 * 101 + 4e-4
    assert estimator.iteration_s(IterationLoad(load)) == pytest.approx(4 * layer_s + 1.5e-3 + 5e-4)
    assert estimator.iteration_s(
        IterationLoad(load, swap_out_bytes=6 * 10**5, swap_in_bytes=4 * 10**5)
    ) == pytest.approx(4 * layer_s + 1.5e-3 + 5e-4 + 1e-3)


def test_one_batch_with_cpu_decodes_runs_both_attentions_side_by_side():
    estimator = TableEstimator(tables(), num_layers=4)
    load = SubBatchLoad(
        num_gpu_decodes=4, gpu_context_tokens=400, num_cpu_decodes=2, cpu_context_tokens=200, num_outputs=6
    )
    assert estimator.iteration_s(IterationLoad(load)) == pytest.approx(4 * (2e-3 + max(4e-4, 2e-3)) + 1.5e-3 + 5e-4)


@pytest.mark.parametrize(
    ("cpu_context_0", "cpu_context_1", "layer_s"),
    [
        (100, 100, 2e-3 + 2e-3 + 5e-5 + 4e-4),  # the CPU hides behind the GPU's work
        (300, 100, 3e-3 + 2e-3),  # a way of the first through both: cpu0 + lin0
        (100, 500, 5e-3 + 2e-3),  # of the second: cpu1 + lin1
        (300, 500, 3e-3 + 5e-3),  # all of the CPU's work
    ],
)
def test_two_sub_batches(cpu_context_0, cpu_context_1, layer_s):
    estimator = TableEstimator(tables(), num_layers=4)
    first = SubBatchLoad(
        prefill_chunks=((50, 0),),
        num_gpu_decodes=4,
        gpu_context_tokens=400,
        num_cpu_decodes=1,
        cpu_context_tokens=cpu_context_0,
        num_outputs=5,
    )
    second = SubBatchLoad(num_cpu_decodes=1, cpu_context_tokens=cpu_context_1, num_outputs=1)
    assert estimator.iteration_s(IterationLoad(first, second)) == pytest.approx(4 * layer_s + 1.5e-3 + 5e-4)


def test_trips_to_the_cpu_cost_copies_on_the_gpu_side_and_signals_on_the_way():
    points = (LinearPoint(1, 1e-4), LinearPoint(11, 6e-4))
    estimator = TableEstimator(tables(cpu_copy=points, cpu_signal_s=3e-5), num_layers=4)
    assert estimator.cpu_decode_s(2, 200) == pytest.approx(2e-3 + 3e-5)
    load = SubBatchLoad(num_cpu_decodes=3, cpu_context_tokens=300, num_outputs=3)
    assert estimator.iteration_s(IterationLoad(load)) == pytest.approx(4 * (2e-3 + 2e-4 + 3e-3 + 3e-5) + 1.2e-3 + 5e-4)
    terms = estimator.terms(IterationLoad(load))
    assert terms.overhead_s == pytest.approx(4 * 2e-4 + 5e-4)
    assert terms.cpu_decode_s == pytest.approx(4 * 3e-3)
    assert terms.cpu_wait_s == pytest.approx(4 * (3e-3 + 3e-5))


FIRST = SubBatchLoad(((50, 0), (8, 30)), 4, 400, 3, 300, num_outputs=8)
SECOND = SubBatchLoad(num_cpu_decodes=2, cpu_context_tokens=700, num_outputs=2)


@pytest.mark.parametrize(
    "load",
    [
        IterationLoad(FIRST, swap_out_bytes=10**6),
        IterationLoad(FIRST, SECOND, swap_in_bytes=10**6),
        IterationLoad(SubBatchLoad(((50, 0),), 4, 400, num_outputs=4), cohort=CohortLoad(5, 900, 3, 0)),
        IterationLoad(cohort=CohortLoad(5, 900, 4, 5)),
    ],
)
def test_terms_add_up_and_follow_their_factors(load):
    factors = Factors(*(1.0 + i / 10 for i in range(5)), contention=0.5, cpu_decode=1.7, head=1.8, swap=1.9)
    for estimator in (TableEstimator(tables(), 4), TableEstimator(tables(), 4).calibrated(factors)):
        terms = estimator.terms(load)
        gpu_s = terms.weights_s + terms.tokens_s + terms.prefill_s + terms.gpu_decode_s + terms.overhead_s
        gpu_s += estimator._factors.contention * terms.overlap_s
        total_s = gpu_s + terms.cpu_wait_s + terms.head_s + terms.swap_s
        assert estimator.iteration_s(load) == pytest.approx(total_s)
    plain = TableEstimator(tables(), 4).terms(load)
    for name in ("weights", "tokens", "prefill", "gpu_decode", "overhead", "cpu_decode", "head", "swap"):
        assert getattr(terms, f"{name}_s") == pytest.approx(getattr(factors, name) * getattr(plain, f"{name}_s"))


def test_timeline_of_measured_operations():
    estimator = TableEstimator(tables(), num_layers=4)
    timeline, terms = (
        estimator.timeline(IterationLoad(FIRST, SECOND, 10**6, 10**5)),
        estimator.terms(IterationLoad(FIRST, SECOND)),
    )
    assert timeline.total_s == estimator.iteration_s(IterationLoad(FIRST, SECOND, 10**6, 10**5))
    gpu_s = terms.weights_s + terms.tokens_s + terms.prefill_s + terms.gpu_decode_s + terms.head_s
    assert (timeline.gpu_s, timeline.cpu_s) == pytest.approx((gpu_s, terms.cpu_decode_s))
    assert (timeline.link_out_s, timeline.link_in_s) == pytest.approx((1e-3, 1e-4))


def test_operations_that_never_run_here_need_no_table():
    estimator = TableEstimator(tables(cpu_decode=(), swap_bytes_per_s=0.0), num_layers=4)
    assert estimator.cpu_decode_s(3, 300) == 0.0
    assert estimator.swap_s(10**9) == 0.0


def test_many_short_sequences_may_be_faster_than_one_long_one():
    """One sequence is shared by one thread, eight by four: at the same total they take less time."""
    points = (
        DecodePoint(1, 100, 1e-3),
        DecodePoint(1, 1000, 1e-2),
        DecodePoint(8, 800, 2e-3),
        DecodePoint(8, 8000, 2e-2),
    )
    estimator = TableEstimator(tables(cpu_decode=points), num_layers=4)
    assert estimator.cpu_decode_s(1, 800) == pytest.approx(8e-3)
    assert estimator.cpu_decode_s(8, 800) == pytest.approx(2e-3)
