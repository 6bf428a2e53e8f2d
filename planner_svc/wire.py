"""Turns plans into protobuf messages, and results and tables out of them; called by the executor client alone."""

from collections.abc import Iterable

from neoflex.v1 import executor_pb2 as pb
from planner_svc.estimator import DecodePoint, LinearPoint, OperationTables, PrefillPoint
from svc_common.plan import (
    CohortStep,
    ExecutionError,
    IterationPlan,
    IterationResult,
    Mode,
    NewSequence,
    PoolWork,
    PromptLogprobs,
    Sampling,
    SubBatch,
    Tier,
    Timings,
    TokenLogprobs,
)
from svc_common.policy import ExecutionPolicy
from svc_common.trace_wire import trace_from_message

_MODES = {
    Mode.GPU_ONLY: pb.EXECUTION_MODE_GPU_ONLY,
    Mode.ASYMMETRIC: pb.EXECUTION_MODE_ASYMMETRIC,
    Mode.SAME_LAYER: pb.EXECUTION_MODE_SAME_LAYER,
    Mode.DECOUPLED: pb.EXECUTION_MODE_DECOUPLED,
}
_TIERS = {Tier.GPU: pb.TIER_GPU, Tier.HOST: pb.TIER_HOST}
_ERRORS: dict[int, ExecutionError] = {
    pb.EXECUTION_ERROR_CPU_ATTENTION_LOST: ExecutionError.CPU_ATTENTION_LOST,
    pb.EXECUTION_ERROR_STALE: ExecutionError.STALE,
    pb.EXECUTION_ERROR_INVALID_PLAN: ExecutionError.INVALID_PLAN,
    pb.EXECUTION_ERROR_DEVICE: ExecutionError.DEVICE,
}


def policy_to_message(policy: ExecutionPolicy) -> pb.ExecutionPolicy:
    return pb.ExecutionPolicy(
        resident_layers=policy.resident_layers,
        prefill_cpu_layers=policy.prefill_cpu_layers,
        decode_cpu_layers=policy.decode_cpu_layers,
    )


def policy_from_message(message: pb.ExecutionPolicy) -> ExecutionPolicy:
    return ExecutionPolicy(message.resident_layers, message.prefill_cpu_layers, message.decode_cpu_layers)


def plan_to_message(plan: IterationPlan) -> pb.IterationPlan:
    """The plan as the executor reads it; `predicted_s` stays here."""
    return pb.IterationPlan(
        epoch=plan.epoch,
        iteration=plan.iteration,
        mode=_MODES[plan.mode],
        released_sequence_ids=plan.released,
        new_sequences=[_new_sequence(new) for new in plan.new_sequences],
        swaps=[
            pb.Swap(sequence_id=swap.sequence_id, target=_TIERS[swap.target], blocks=swap.blocks) for swap in plan.swaps
        ],
        new_blocks=[pb.NewBlocks(sequence_id=new.sequence_id, blocks=new.blocks) for new in plan.new_blocks],
        sub_batches=[_sub_batch(batch) for batch in plan.sub_batches],
        cohort=_cohort(plan.cohort) if plan.cohort else None,
        trace=plan.trace,
    )


def _new_sequence(new: NewSequence) -> pb.NewSequence:
    return pb.NewSequence(
        sequence_id=new.sequence_id,
        token_ids=new.token_ids,
        tier=_TIERS[new.tier],
        blocks=new.blocks,
        sampling=_sampling(new.sampling),
        num_generated_tokens=new.num_generated_tokens,
        num_cached_tokens=new.num_cached_tokens,
    )


def _sampling(sampling: Sampling) -> pb.SequenceSampling:
    return pb.SequenceSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        num_logprobs=sampling.num_logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        biased_token_ids=[token_id for token_id, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        grammar=sampling.grammar,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
    )


def _sub_batch(batch: SubBatch) -> pb.SubBatch:
    return pb.SubBatch(
        prefills=[
            pb.PrefillChunk(sequence_id=chunk.sequence_id, start=chunk.start, num_tokens=chunk.num_tokens)
            for chunk in batch.prefills
        ],
        gpu_decode_sequence_ids=batch.gpu_decodes,
        cpu_decode_sequence_ids=batch.cpu_decodes,
    )


def _cohort(step: CohortStep) -> pb.CohortStep:
    return pb.CohortStep(sequence_ids=step.sequence_ids, start_layer=step.start_layer, num_layers=step.num_layers)


def result_from_message(message: pb.IterationResult) -> IterationResult:
    """Raises ValueError where the message contradicts itself."""
    timings = message.timings
    return IterationResult(
        epoch=message.epoch,
        iteration=message.iteration,
        tokens=tuple(zip(message.sequence_ids, message.token_ids, strict=True)),
        logprobs={
            item.sequence_id: TokenLogprobs(item.chosen, tuple(zip(item.top_token_ids, item.top_logprobs, strict=True)))
            for item in message.logprobs
        },
        prompt_logprobs=tuple((item.sequence_id, _prompt_logprobs(item)) for item in message.prompt_logprobs),
        grammar_failures={item.sequence_id: item.message for item in message.grammar_failures},
        not_finite=tuple(message.not_finite_sequence_ids),
        timings=Timings(
            total_ns=timings.total_ns,
            cpu_wait_ns=timings.cpu_wait_ns,
            cpu_attention_ns=timings.cpu_attention_ns,
            swap_ns=timings.swap_ns,
            head_ns=timings.head_ns,
            idle_ns=timings.idle_ns,
            prompt_logprobs_ns=timings.prompt_logprobs_ns,
            weight_wait_ns=timings.weight_wait_ns,
            weight_bytes=timings.weight_bytes,
        ),
        swapped_out_bytes=message.swapped_out_bytes,
        swapped_in_bytes=message.swapped_in_bytes,
        gpu_attended_tokens=message.gpu_attended_tokens,
        cpu_attended_tokens=message.cpu_attended_tokens,
        pool_work=tuple(PoolWork(item.attention_ns, item.attended_tokens) for item in message.host_pool_work),
        error=_error(message.error),
        error_message=message.error_message,
        trace=trace_from_message(message.trace) if message.HasField("trace") else None,
    )


def _error(value: int) -> ExecutionError | None:
    if value == pb.EXECUTION_ERROR_UNSPECIFIED:
        return None
    # A newer executor's word for a failure is still a failure: no token of the result may be used.
    return _ERRORS.get(value, ExecutionError.DEVICE)


def _prompt_logprobs(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Raises ValueError where not every position has as many of the likeliest."""
    num_positions, num_top = len(message.chosen), len(message.top_token_ids)
    if num_positions == 0 or num_top % num_positions or num_top != len(message.top_logprobs):
        raise ValueError(f"{num_positions} positions of a prompt with {num_top} of their likeliest tokens")
    return PromptLogprobs(
        message.start, tuple(message.chosen), tuple(message.top_token_ids), tuple(message.top_logprobs)
    )


def tables_from_message(message: pb.OperationTables) -> OperationTables:
    """The measured tables as the estimator takes them."""
    return OperationTables(
        linear=_linear_points(message.linear),
        prefill=_prefill_points(message.prefill),
        gpu_decode=_decode_points(message.gpu_decode),
        cpu_decode=_decode_points(message.cpu_decode),
        head=_linear_points(message.head),
        swap_bytes_per_s=message.swap_bytes_per_s,
        iteration_s=message.iteration_s,
        cpu_copy=_linear_points(message.cpu_copy),
        cpu_signal_s=message.cpu_signal_s,
        cpu_pool_factors=tuple(message.cpu_pool_factors),
        cpu_linear=_linear_points(message.cpu_linear),
        cpu_prefill=_prefill_points(message.cpu_prefill),
        link_bytes_per_s=message.link_bytes_per_s,
    )


def _prefill_points(points: Iterable[pb.PrefillPoint]) -> tuple[PrefillPoint, ...]:
    return tuple(PrefillPoint(p.chunk_tokens, p.past_tokens, p.seconds) for p in points)


def _linear_points(points: Iterable[pb.LinearPoint]) -> tuple[LinearPoint, ...]:
    return tuple(LinearPoint(p.num_tokens, p.seconds) for p in points)


def _decode_points(points: Iterable[pb.DecodePoint]) -> tuple[DecodePoint, ...]:
    return tuple(DecodePoint(p.num_sequences, p.context_tokens, p.seconds) for p in points)
