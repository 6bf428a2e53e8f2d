import pytest
from support.traces import pipelined

from gpu_svc.wire import plan_from_pb
from neoflex.v1 import executor_pb2 as pb
from planner_svc.estimator import DecodePoint, LinearPoint, OperationTables, PrefillPoint
from planner_svc.wire import plan_to_message, result_from_message, tables_from_message
from svc_common.plan import (
    CohortStep,
    ExecutionError,
    IterationPlan,
    IterationResult,
    Mode,
    NewBlocks,
    NewSequence,
    PrefillChunk,
    Sampling,
    SubBatch,
    Swap,
    Tier,
    Timings,
    TokenLogprobs,
)
from svc_common.trace_wire import trace_to_message


def test_every_field_of_a_plan_arrives():
    plan = IterationPlan(
        epoch=7,
        iteration=3,
        mode=Mode.ASYMMETRIC,
        released=(1, 2),
        new_sequences=(NewSequence(9, (5, 6, 7), Tier.HOST, (4, 8), Sampling(0.5, 40, 0.75, 0.125, 2**63 + 1, 3), 2),),
        swaps=(Swap(4, Tier.HOST, (1, 0)), Swap(5, Tier.GPU, (3,))),
        new_blocks=(NewBlocks(6, (11, 12)),),
        sub_batches=(
            SubBatch((PrefillChunk(9, 0, 3),), (5, 6), (4,)),
            SubBatch(cpu_decodes=(10,)),
        ),
        host_blocks_used=13,
        trace=True,
        predicted_s=0.5,
    )
    assert plan_to_message(plan) == pb.IterationPlan(
        epoch=7,
        iteration=3,
        mode=pb.EXECUTION_MODE_ASYMMETRIC,
        released_sequence_ids=[1, 2],
        new_sequences=[
            pb.NewSequence(
                sequence_id=9,
                token_ids=[5, 6, 7],
                tier=pb.TIER_HOST,
                blocks=[4, 8],
                sampling=pb.SequenceSampling(
                    temperature=0.5, top_k=40, top_p=0.75, min_p=0.125, seed=2**63 + 1, num_logprobs=3
                ),
                num_generated_tokens=2,
            )
        ],
        swaps=[
            pb.Swap(sequence_id=4, target=pb.TIER_HOST, blocks=[1, 0]),
            pb.Swap(sequence_id=5, target=pb.TIER_GPU, blocks=[3]),
        ],
        new_blocks=[pb.NewBlocks(sequence_id=6, blocks=[11, 12])],
        sub_batches=[
            pb.SubBatch(
                prefills=[pb.PrefillChunk(sequence_id=9, start=0, num_tokens=3)],
                gpu_decode_sequence_ids=[5, 6],
                cpu_decode_sequence_ids=[4],
            ),
            pb.SubBatch(cpu_decode_sequence_ids=[10]),
        ],
        host_blocks_used=13,
        trace=True,
    )


def test_a_cohort_arrives():
    batch = SubBatch(gpu_decodes=(3,))
    plan = IterationPlan(7, 3, Mode.DECOUPLED, sub_batches=(batch,), cohort=CohortStep((5, 4), 2, 6))
    message = plan_to_message(plan)
    assert message == pb.IterationPlan(
        epoch=7,
        iteration=3,
        mode=pb.EXECUTION_MODE_DECOUPLED,
        sub_batches=[pb.SubBatch(gpu_decode_sequence_ids=[3])],
        cohort=pb.CohortStep(sequence_ids=[5, 4], start_layer=2, num_layers=6),
    )
    assert plan_from_pb(message) == plan
    assert plan_to_message(IterationPlan(7, 4, Mode.SAME_LAYER)).mode == pb.EXECUTION_MODE_SAME_LAYER
    assert not plan_to_message(IterationPlan(7, 4, Mode.SAME_LAYER)).HasField("cohort")


def test_every_field_of_a_result_arrives():
    message = pb.IterationResult(
        epoch=7,
        iteration=3,
        sequence_ids=[9, 5],
        token_ids=[100, 200],
        logprobs=[pb.SequenceLogprobs(sequence_id=5, chosen=-0.5, top_token_ids=[200, 3], top_logprobs=[-0.5, -1.5])],
        timings=pb.IterationTimings(
            total_ns=1,
            cpu_wait_ns=2,
            cpu_attention_ns=3,
            swap_ns=4,
            head_ns=5,
            idle_ns=6,
            weight_wait_ns=11,
            weight_bytes=12,
        ),
        swapped_out_bytes=7,
        swapped_in_bytes=8,
        gpu_attended_tokens=9,
        cpu_attended_tokens=10,
        trace=trace_to_message(pipelined(3, 11)),
    )
    assert result_from_message(message) == IterationResult(
        epoch=7,
        iteration=3,
        tokens=((9, 100), (5, 200)),
        logprobs={5: TokenLogprobs(-0.5, ((200, -0.5), (3, -1.5)))},
        timings=Timings(1, 2, 3, 4, 5, 6, 11, 12),
        swapped_out_bytes=7,
        swapped_in_bytes=8,
        gpu_attended_tokens=9,
        cpu_attended_tokens=10,
        trace=pipelined(3, 11),
    )


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (pb.EXECUTION_ERROR_UNSPECIFIED, None),
        (pb.EXECUTION_ERROR_CPU_ATTENTION_LOST, ExecutionError.CPU_ATTENTION_LOST),
        (pb.EXECUTION_ERROR_STALE, ExecutionError.STALE),
        (pb.EXECUTION_ERROR_INVALID_PLAN, ExecutionError.INVALID_PLAN),
        (pb.EXECUTION_ERROR_DEVICE, ExecutionError.DEVICE),
        (99, ExecutionError.DEVICE),  # a newer executor's word: a failure all the same
    ],
)
def test_errors_of_a_result(value, error):
    result = result_from_message(pb.IterationResult(error=value, error_message="why"))
    assert (result.error, result.error_message) == (error, "why")


def test_a_result_with_fewer_tokens_than_sequences_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        result_from_message(pb.IterationResult(sequence_ids=[1, 2], token_ids=[3]))


def test_every_field_of_the_tables_arrives():
    message = pb.OperationTables(
        linear=[pb.LinearPoint(num_tokens=1, seconds=0.5)],
        prefill=[pb.PrefillPoint(chunk_tokens=2, past_tokens=3, seconds=0.25)],
        gpu_decode=[pb.DecodePoint(num_sequences=4, context_tokens=5, seconds=0.75)],
        cpu_decode=[pb.DecodePoint(num_sequences=6, context_tokens=7, seconds=1.5)],
        head=[pb.LinearPoint(num_tokens=8, seconds=2.5)],
        swap_bytes_per_s=9.0,
        iteration_s=0.125,
        cpu_copy=[pb.LinearPoint(num_tokens=10, seconds=3.5)],
        cpu_signal_s=0.0625,
    )
    assert tables_from_message(message) == OperationTables(
        linear=(LinearPoint(1, 0.5),),
        prefill=(PrefillPoint(2, 3, 0.25),),
        gpu_decode=(DecodePoint(4, 5, 0.75),),
        cpu_decode=(DecodePoint(6, 7, 1.5),),
        head=(LinearPoint(8, 2.5),),
        swap_bytes_per_s=9.0,
        iteration_s=0.125,
        cpu_copy=(LinearPoint(10, 3.5),),
        cpu_signal_s=0.0625,
    )
