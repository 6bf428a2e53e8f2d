import pytest
from support.traces import pipelined

from gpu_svc.limits import InvalidPlanError
from gpu_svc.wire import plan_from_pb, result_to_pb
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
    PoolWork,
    PrefillChunk,
    PromptLogprobs,
    Sampling,
    SubBatch,
    Swap,
    Tier,
    Timings,
    TokenLogprobs,
)
from svc_common.trace_wire import trace_to_message

SAMPLING = Sampling(0.5, 40, 0.75, 0.125, 2**63 + 1, 3, -0.25, 0.5, 1.25, ((3, -1.5), (90, 2.0)), "{}", 4)


def test_every_field_of_sampling_comes_out_as_it_went_in():
    new = NewSequence(9, (5, 6, 7), Tier.HOST, (4, 8), SAMPLING, 2)
    plan = IterationPlan(1, 1, Mode.GPU_ONLY, new_sequences=(new,))
    assert plan_from_pb(plan_to_message(plan)) == plan
    message = plan_to_message(plan)
    message.new_sequences[0].sampling.biases.pop()
    with pytest.raises(InvalidPlanError, match="not as many biases as biased tokens"):
        plan_from_pb(message)


def test_every_field_of_a_plan_arrives():
    plan = IterationPlan(
        epoch=7,
        iteration=3,
        mode=Mode.ASYMMETRIC,
        released=(1, 2),
        new_sequences=(NewSequence(9, (5, 6, 7), Tier.HOST, (4, 8), SAMPLING, 2),),
        swaps=(Swap(4, Tier.HOST, (1, 0)), Swap(5, Tier.GPU, (3,))),
        new_blocks=(NewBlocks(6, (11, 12)),),
        sub_batches=(
            SubBatch((PrefillChunk(9, 0, 3),), (5, 6), (4,)),
            SubBatch(cpu_decodes=(10,)),
        ),
        trace=True,
        predicted_s=0.5,
        pool_decodes=(1, 1),
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
                    temperature=0.5,
                    top_k=40,
                    top_p=0.75,
                    min_p=0.125,
                    seed=2**63 + 1,
                    num_logprobs=3,
                    presence_penalty=-0.25,
                    frequency_penalty=0.5,
                    repetition_penalty=1.25,
                    biased_token_ids=[3, 90],
                    biases=[-1.5, 2.0],
                    grammar="{}",
                    num_prompt_logprobs=4,
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
            prompt_logprobs_ns=7,
            weight_wait_ns=11,
            weight_bytes=12,
        ),
        swapped_out_bytes=7,
        swapped_in_bytes=8,
        gpu_attended_tokens=9,
        cpu_attended_tokens=10,
        trace=trace_to_message(pipelined(3, 11)),
        host_pool_work=[pb.HostPoolWork(attention_ns=1, attended_tokens=4), pb.HostPoolWork(attention_ns=2)],
        prompt_logprobs=[
            pb.PromptLogprobs(sequence_id=9, start=4, chosen=[-1.0, -2.0]),
            pb.PromptLogprobs(
                sequence_id=5, start=1, chosen=[-3.0, -4.0], top_token_ids=[1, 2, 3, 4], top_logprobs=[-1, -2, -3, -4]
            ),
        ],
        grammar_failures=[pb.GrammarFailure(sequence_id=5, message="why")],
    )
    assert result_to_pb(result_from_message(message)) == message
    assert result_from_message(message) == IterationResult(
        epoch=7,
        iteration=3,
        tokens=((9, 100), (5, 200)),
        logprobs={5: TokenLogprobs(-0.5, ((200, -0.5), (3, -1.5)))},
        timings=Timings(1, 2, 3, 4, 5, 6, 7, 11, 12),
        swapped_out_bytes=7,
        swapped_in_bytes=8,
        gpu_attended_tokens=9,
        cpu_attended_tokens=10,
        trace=pipelined(3, 11),
        pool_work=(PoolWork(1, 4), PoolWork(2, 0)),
        prompt_logprobs=(
            (9, PromptLogprobs(4, (-1.0, -2.0), (), ())),
            (5, PromptLogprobs(1, (-3.0, -4.0), (1, 2, 3, 4), (-1.0, -2.0, -3.0, -4.0))),
        ),
        grammar_failures={5: "why"},
    )


def test_the_likeliest_at_each_position_of_a_prompt():
    part = PromptLogprobs(1, (-3.0, -4.0), (1, 2, 3, 4), (-1.0, -2.0, -3.0, -4.0))
    assert part.position(1) == TokenLogprobs(-4.0, ((3, -3.0), (4, -4.0)))
    assert PromptLogprobs(4, (-1.0,), (), ()).position(0) == TokenLogprobs(-1.0, ())


@pytest.mark.parametrize(
    "part",
    [
        pb.PromptLogprobs(),
        pb.PromptLogprobs(chosen=[1, 2], top_token_ids=[1], top_logprobs=[1]),
        pb.PromptLogprobs(chosen=[1], top_token_ids=[1], top_logprobs=[]),
    ],
)
def test_positions_of_a_prompt_that_lack_something_are_refused(part):
    with pytest.raises(ValueError, match="positions of a prompt"):
        result_from_message(pb.IterationResult(prompt_logprobs=[part]))


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
        cpu_pool_factors=(1.0, 1.5),
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
        cpu_pool_factors=(1.0, 1.5),
    )
