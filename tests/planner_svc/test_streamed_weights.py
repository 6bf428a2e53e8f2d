"""What weights that are streamed add to an iteration; hand-worked, of 10 layers."""

import pytest

from planner_svc.estimator import (
    Calibration,
    CohortLoad,
    DecodePoint,
    Factors,
    IterationLoad,
    LinearPoint,
    OperationTables,
    SubBatchLoad,
    TableEstimator,
)
from svc_common.plan import Mode, Timings

NUM_LAYERS = 10
TABLES = OperationTables(
    linear=(LinearPoint(1, 1.0),),
    prefill=(),
    gpu_decode=(),
    cpu_decode=(DecodePoint(1, 16, 3.0),),
    head=(LinearPoint(1, 4.0),),
    swap_bytes_per_s=100.0,
    iteration_s=2.0,
    link_bytes_per_s=50.0,
)
BATCH = SubBatchLoad(num_gpu_decodes=1, gpu_context_tokens=16, num_outputs=1)
ONE = IterationLoad(BATCH)
"""10 s of layers and 6 s beside them."""


def streaming(num_layers: int, layer_bytes: int) -> TableEstimator:
    estimator = TableEstimator(TABLES, NUM_LAYERS)
    estimator.stream(num_layers, num_layers * layer_bytes)
    return estimator


@pytest.mark.parametrize(
    ("num_layers", "layer_bytes", "waits_s"),
    [
        (0, 0, 0.0),
        # 1 s for each layer, which takes 1 s to compute.
        (10, 50, 0.0),
        (6, 50, 0.0),
        # 2 s for each: of the 20 two layers' 4 come beside the head and the rest, 10 beside the layers.
        (10, 100, 6.0),
        # 4 s for each: two layers would take 8 s beside the 6 there are.
        (10, 200, 40 - 10 - 6),
        # 2 s for each of 8, which take 8 s; two of them come meanwhile, beside 2 s of layers and 6 s of the rest.
        (8, 100, 16 - 8 - 4),
        # 20 s for each of 3; 7 + 6 s hide a part of two.
        (3, 1000, 60 - 3 - 13),
    ],
)
def test_an_iteration_waits_for_what_nothing_hides(num_layers: int, layer_bytes: int, waits_s: float) -> None:
    estimator = streaming(num_layers, layer_bytes)
    assert estimator.terms(ONE).weight_wait_s == pytest.approx(waits_s)
    assert estimator.iteration_s(ONE) == pytest.approx(16 + waits_s)
    assert estimator.timeline(ONE).link_in_s == pytest.approx(num_layers * layer_bytes / 50)


def test_nothing_is_awaited_where_no_layer_runs() -> None:
    estimator = streaming(10, 1000)
    assert estimator.terms(IterationLoad()).weight_wait_s == 0.0
    assert estimator.iteration_s(IterationLoad(swap_in_bytes=100)) == pytest.approx(1 + 2)


def test_a_cohort_beside_a_batch_hides_nothing() -> None:
    """It keeps one of two buffers. Alone it streams the layers of its part, hidden as those of a batch."""
    estimator = streaming(10, 100)
    cohort = CohortLoad(num_sequences=1, context_tokens=16, num_layers=5)
    assert estimator.terms(IterationLoad(BATCH, cohort=cohort)).weight_wait_s == pytest.approx(20 + 10)
    alone = estimator.terms(IterationLoad(cohort=cohort))
    layers_s = 5 * (1 + 3)
    assert alone.weight_wait_s == pytest.approx(max(0, 10 - layers_s))


def test_calibrated_copies_follow_what_is_streamed() -> None:
    estimator = TableEstimator(TABLES, NUM_LAYERS)
    copy = estimator.calibrated(Factors(weights=2.0))
    assert copy.terms(ONE).weight_wait_s == 0.0
    estimator.stream(10, 2000)
    assert copy.terms(ONE).weight_wait_s == pytest.approx(40 - 20 - 6)
    estimator.stream(0, 0)
    assert copy.terms(ONE).weight_wait_s == 0.0


def test_a_link_that_was_not_measured_takes_no_time() -> None:
    estimator = TableEstimator(OperationTables((), (), (), (), (), 0.0, 0.0), NUM_LAYERS)
    estimator.stream(10, 10**9)
    assert estimator.terms(ONE).weight_wait_s == 0.0


def test_waiting_for_weights_says_nothing_of_the_operations() -> None:
    calibration = Calibration(streaming(10, 200))
    for _ in range(20):
        calibration.observe(
            Mode.GPU_ONLY,
            ONE,
            Timings(total_ns=40_000_000_000, head_ns=4_000_000_000, weight_wait_ns=24_000_000_000),
        )
    assert calibration.estimator.terms(ONE).weights_s == pytest.approx(10)
    assert calibration.estimator.iteration_s(ONE) == pytest.approx(40)
