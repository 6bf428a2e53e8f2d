"""Layers on the CPU as the planner sees them: what is configured, and what an iteration then takes."""

from dataclasses import replace
from typing import Any

import pytest
from support.planning import Loop, make_capacity

from planner_svc.configured_policy import configured_policy
from planner_svc.estimator import (
    DecodePoint,
    Factors,
    IterationLoad,
    LinearPoint,
    OperationTables,
    PrefillPoint,
    SubBatchLoad,
    TableEstimator,
)
from planner_svc.estimator.cpu_layers import PassSeconds, timeline
from svc_common.config import ConfigError, PlannerConfig
from svc_common.plan import Mode
from svc_common.policy import ExecutionPolicy


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"prefill_policy": "resident", "decode_policy": "offload"}, ExecutionPolicy(6)),
        ({"decode_policy": "partition", "cpu_layers": 2}, ExecutionPolicy(6, 0, 2)),
        ({"prefill_policy": "partition", "decode_policy": "partition", "cpu_layers": 5}, ExecutionPolicy(1, 5, 5)),
        ({"prefill_policy": "partition", "decode_policy": "cpu_only", "cpu_layers": 5}, ExecutionPolicy(1, 5, 6)),
        ({"prefill_policy": "cpu_only", "decode_policy": "cpu_only"}, ExecutionPolicy(0, 6, 6)),
    ],
)
def test_what_is_configured(keys: dict[str, Any], expected: ExecutionPolicy | None) -> None:
    policy = configured_policy(PlannerConfig(**keys), num_layers=6)
    assert policy == expected
    if policy:
        policy.check(6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decode_policy": "partition"}, "planner.cpu_layers must be from 1 to 5 of the model's 6 layers"),
        ({"decode_policy": "partition", "cpu_layers": 6}, "for a partition, is 6"),
        ({"prefill_policy": "cpu_only"}, '"cpu_only" computes 6 layers on the CPU, which must be at most the 0'),
    ],
)
def test_what_the_model_cannot_have(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured_policy(PlannerConfig(**keys), num_layers=6)


def test_one_sub_batch_waits_for_its_layers() -> None:
    line = timeline(PassSeconds(cpu_last_s=3.0, gpu_upper_s=2.0), PassSeconds())
    assert (line.gpu_s, line.wait_s, line.cpu_s, line.overlap_s) == (2.0, 3.0, 3.0, 0.0)


def test_prompts_on_the_gpu_lie_beside_decodes_on_the_cpu() -> None:
    line = timeline(PassSeconds(cpu_last_s=3.0, gpu_prompts_s=2.5, gpu_upper_s=2.0), PassSeconds())
    assert (line.gpu_s, line.wait_s, line.overlap_s) == (4.5, 0.5, 2.5)


def test_two_sub_batches_follow_one_another() -> None:
    """CPU: 0 until 3, 1 until 5. GPU: 0 from 3 to 7, then 1, which waits no longer."""
    first, second = PassSeconds(cpu_last_s=3.0, gpu_upper_s=4.0), PassSeconds(cpu_last_s=2.0, gpu_upper_s=1.0)
    line = timeline(first, second)
    assert (line.gpu_s, line.wait_s, line.overlap_s) == (5.0, 3.0, 2.0)
    line = timeline(second, first)  # 1 is done at 3 and waits until 5.
    assert (line.gpu_s, line.wait_s, line.overlap_s) == (5.0, 4.0, 1.0)


def test_a_sub_batch_that_need_not_wait_goes_first() -> None:
    line = timeline(PassSeconds(cpu_last_s=3.0, gpu_upper_s=1.0), PassSeconds(gpu_prompts_s=1.0, gpu_upper_s=2.0))
    assert (line.gpu_s, line.wait_s) == (4.0, 0.0)


def test_prompts_that_begin_on_the_cpu() -> None:
    """CPU: prompts until 1, decodes until 4. GPU: prompts from 1 to 3, all from 4 to 6."""
    batch = PassSeconds(cpu_prompts_s=1.0, cpu_last_s=3.0, gpu_prompts_s=2.0, gpu_upper_s=2.0)
    line = timeline(batch, PassSeconds())
    assert (line.gpu_s, line.wait_s, line.cpu_s) == (4.0, 2.0, 4.0)


# Seconds of one layer; each does not depend on how much there is, so that sums are easy.
TABLES = OperationTables(
    linear=(LinearPoint(1, 10.0),),
    prefill=(PrefillPoint(1, 0, 4.0),),
    gpu_decode=(DecodePoint(1, 1, 2.0),),
    cpu_decode=(DecodePoint(1, 1, 7.0),),
    head=(LinearPoint(1, 100.0),),
    swap_bytes_per_s=0.0,
    iteration_s=1000.0,
    cpu_linear=(LinearPoint(1, 30.0),),
    cpu_prefill=(PrefillPoint(1, 0, 5.0),),
)
MIXED = SubBatchLoad(((8, 0),), num_gpu_decodes=2, gpu_context_tokens=20, num_outputs=3)


def test_an_iteration_by_its_policy() -> None:
    """Of 5 layers 3 on the CPU."""
    # Both pass the CPU together: 3 * (30 + 5 + 7), then 2 * (10 + 4 + 2).
    both = TableEstimator(TABLES, 5, ExecutionPolicy(2, 3, 3))
    assert both.iteration_s(IterationLoad(MIXED)) == pytest.approx(126 + 32 + 1100)
    # Decodes 3 * (30 + 7), beside them prompts 3 * (10 + 4).
    decodes = TableEstimator(TABLES, 5, ExecutionPolicy(5, 0, 3))
    assert decodes.iteration_s(IterationLoad(MIXED)) == pytest.approx(111 + 32 + 1100)
    # Prompts 30 + 5; then decodes 111, beside them prompts 2 * 14.
    some = TableEstimator(TABLES, 5, ExecutionPolicy(4, 1, 3))
    assert some.iteration_s(IterationLoad(MIXED)) == pytest.approx(35 + 111 + 32 + 1100)
    terms = some.terms(IterationLoad(MIXED))
    assert terms.cpu_decode_s == pytest.approx(35 + 111)
    assert terms.cpu_wait_s == pytest.approx(35 + 111 - 28)
    assert terms.prefill_s == pytest.approx(4 * 4)
    assert terms.gpu_decode_s == pytest.approx(2 * 2)
    assert terms.weights_s + terms.tokens_s == pytest.approx(2 * 10 + 2 * 10)
    assert terms.overlap_s == pytest.approx(28)


def test_attention_on_the_cpu_above_its_layers() -> None:
    """A host sequence's decodes wait for the CPU in each of the GPU's layers, too."""
    estimator = TableEstimator(TABLES, 5, ExecutionPolicy(2, 3, 3))
    load = SubBatchLoad(num_cpu_decodes=2, cpu_context_tokens=20, num_outputs=2)
    assert estimator.iteration_s(IterationLoad(load)) == pytest.approx(3 * 37 + 2 * (10 + 7) + 1100)
    assert estimator.terms(IterationLoad(load)).cpu_decode_s == pytest.approx(3 * 37 + 2 * 7)


def test_all_on_the_cpu_and_a_slower_one() -> None:
    estimator = TableEstimator(TABLES, 5, ExecutionPolicy(0, 5, 5)).calibrated(Factors(cpu_decode=2.0))
    assert estimator.iteration_s(IterationLoad(MIXED)) == pytest.approx(2 * 5 * 42 + 1100)
    assert estimator.terms(IterationLoad(MIXED)).weights_s == 0.0


def test_layers_of_prompts_alone_are_not_streamed_for_decodes() -> None:
    """Of 5 layers 3 are streamed, all of which the CPU computes for decodes."""
    tables = replace(TABLES, link_bytes_per_s=1.0)
    decodes = SubBatchLoad(num_gpu_decodes=2, gpu_context_tokens=20, num_outputs=2)
    for policy in (ExecutionPolicy(2, 0, 3), ExecutionPolicy(2, 0, 2)):
        quiet, streaming = (TableEstimator(tables, 5, policy) for _ in range(2))
        streaming.stream(3, 10**6)
        assert streaming.iteration_s(IterationLoad(MIXED)) > quiet.iteration_s(IterationLoad(MIXED))
        is_needed = policy.decode_cpu_layers < 3
        assert (streaming.iteration_s(IterationLoad(decodes)) > quiet.iteration_s(IterationLoad(decodes))) == is_needed


# Each token costs the same on either processor, so that halves overlap without loss.
EVEN = OperationTables(
    linear=(LinearPoint(1, 1e-4), LinearPoint(100, 1e-2)),
    prefill=(),
    gpu_decode=(),
    cpu_decode=(DecodePoint(1, 1, 0.0),),
    head=(LinearPoint(1, 0.0),),
    swap_bytes_per_s=1e9,
    iteration_s=0.0,
    cpu_linear=(LinearPoint(1, 1e-4), LinearPoint(100, 1e-2)),
)


def test_prompts_are_split_where_both_processors_gain() -> None:
    """And no cohort is formed; without CPU layers a prompt stays whole."""
    capacity = replace(make_capacity(100, 100), has_cpu_layers=True)
    loop = Loop(capacity, estimator=TableEstimator(EVEN, 4, ExecutionPolicy(2, 2, 2)))
    for num_tokens in (30, 50, 41):
        loop.add(num_tokens, 12)
    loop.run_until_idle()
    assert {plan.mode for plan in loop.plans} <= {Mode.GPU_ONLY, Mode.ASYMMETRIC, Mode.SAME_LAYER}
    first = loop.plans[0]
    assert [batch.num_tokens for batch in first.sub_batches] == [16, 16]
    # 16 tokens through 2 layers on the CPU, then both processors at once, then the GPU alone.
    assert first.predicted_s == pytest.approx(3 * 2 * 16e-4)
    whole = Loop(make_capacity(100, 100), estimator=TableEstimator(EVEN, 4))
    whole.add(30, 2)
    assert [batch.num_tokens for batch in whole.step().sub_batches] == [30]
