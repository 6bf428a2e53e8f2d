"""Turns protobuf messages of ExecutorService into values and back. Checks form only; the state is the executor's."""

import math
from typing import Any

from google.protobuf import json_format

from gpu_svc.device_memory import DeviceMemory
from gpu_svc.executor import Status
from gpu_svc.limits import InvalidPlanError
from gpu_svc.tables import Tables
from neoflex.v1 import executor_pb2 as pb
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
)
from svc_common.policy import ExecutionPolicy
from svc_common.trace_wire import trace_to_message

_MODES = {
    pb.EXECUTION_MODE_GPU_ONLY: Mode.GPU_ONLY,
    pb.EXECUTION_MODE_ASYMMETRIC: Mode.ASYMMETRIC,
    pb.EXECUTION_MODE_SAME_LAYER: Mode.SAME_LAYER,
    pb.EXECUTION_MODE_DECOUPLED: Mode.DECOUPLED,
}
_TIERS = {pb.TIER_GPU: Tier.GPU, pb.TIER_HOST: Tier.HOST}
_ERRORS = {
    None: pb.EXECUTION_ERROR_UNSPECIFIED,
    ExecutionError.CPU_ATTENTION_LOST: pb.EXECUTION_ERROR_CPU_ATTENTION_LOST,
    ExecutionError.STALE: pb.EXECUTION_ERROR_STALE,
    ExecutionError.INVALID_PLAN: pb.EXECUTION_ERROR_INVALID_PLAN,
    ExecutionError.DEVICE: pb.EXECUTION_ERROR_DEVICE,
}


def policy_from_pb(policy: pb.ExecutionPolicy) -> ExecutionPolicy:
    return ExecutionPolicy(policy.resident_layers, policy.prefill_cpu_layers, policy.decode_cpu_layers)


def policy_to_pb(policy: ExecutionPolicy) -> pb.ExecutionPolicy:
    return pb.ExecutionPolicy(
        resident_layers=policy.resident_layers,
        prefill_cpu_layers=policy.prefill_cpu_layers,
        decode_cpu_layers=policy.decode_cpu_layers,
    )


def plan_from_pb(plan: pb.IterationPlan) -> IterationPlan:
    """Raises InvalidPlanError where an enum is not set."""
    if plan.mode not in _MODES:
        raise InvalidPlanError(f"mode {plan.mode} is none")
    return IterationPlan(
        epoch=plan.epoch,
        iteration=plan.iteration,
        mode=_MODES[plan.mode],
        released=tuple(plan.released_sequence_ids),
        new_sequences=tuple(map(_new_sequence, plan.new_sequences)),
        swaps=tuple(Swap(swap.sequence_id, _tier(swap.target), tuple(swap.blocks)) for swap in plan.swaps),
        new_blocks=tuple(NewBlocks(more.sequence_id, tuple(more.blocks)) for more in plan.new_blocks),
        sub_batches=tuple(map(_sub_batch, plan.sub_batches)),
        cohort=_cohort(plan.cohort) if plan.HasField("cohort") else None,
        trace=plan.trace,
        traceparent=plan.traceparent,
    )


def _new_sequence(new: pb.NewSequence) -> NewSequence:
    sampling = new.sampling
    return NewSequence(
        sequence_id=new.sequence_id,
        token_ids=tuple(new.token_ids),
        tier=_tier(new.tier),
        blocks=tuple(new.blocks),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            num_logprobs=sampling.num_logprobs,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=_logit_bias(sampling),
            grammar=sampling.grammar,
            num_prompt_logprobs=sampling.num_prompt_logprobs,
        ),
        num_generated_tokens=new.num_generated_tokens,
        num_cached_tokens=new.num_cached_tokens,
    )


def _logit_bias(sampling: pb.SequenceSampling) -> tuple[tuple[int, float], ...]:
    if len(sampling.biased_token_ids) != len(sampling.biases):
        raise InvalidPlanError("not as many biases as biased tokens")
    return tuple(zip(sampling.biased_token_ids, sampling.biases, strict=True))


def _sub_batch(sub_batch: pb.SubBatch) -> SubBatch:
    return SubBatch(
        prefills=tuple(PrefillChunk(chunk.sequence_id, chunk.start, chunk.num_tokens) for chunk in sub_batch.prefills),
        gpu_decodes=tuple(sub_batch.gpu_decode_sequence_ids),
        cpu_decodes=tuple(sub_batch.cpu_decode_sequence_ids),
    )


def _cohort(step: pb.CohortStep) -> CohortStep:
    return CohortStep(tuple(step.sequence_ids), step.start_layer, step.num_layers)


def _tier(value: pb.Tier) -> Tier:
    if value not in _TIERS:
        raise InvalidPlanError(f"tier {value} is none")
    return _TIERS[value]


def result_to_pb(result: IterationResult) -> pb.IterationResult:
    timings = result.timings
    return pb.IterationResult(
        epoch=result.epoch,
        iteration=result.iteration,
        sequence_ids=[sequence_id for sequence_id, _ in result.tokens],
        token_ids=[token for _, token in result.tokens],
        logprobs=[
            pb.SequenceLogprobs(
                sequence_id=sequence_id,
                chosen=row.chosen,
                top_token_ids=[token for token, _ in row.top],
                top_logprobs=[value for _, value in row.top],
            )
            for sequence_id, row in result.logprobs.items()
        ],
        prompt_logprobs=[
            pb.PromptLogprobs(
                sequence_id=sequence_id,
                start=part.start,
                chosen=part.chosen,
                top_token_ids=part.top_token_ids,
                top_logprobs=part.top_logprobs,
            )
            for sequence_id, part in result.prompt_logprobs
        ],
        grammar_failures=[
            pb.GrammarFailure(sequence_id=sequence_id, message=message)
            for sequence_id, message in result.grammar_failures.items()
        ],
        timings=pb.IterationTimings(
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
        swapped_out_bytes=result.swapped_out_bytes,
        swapped_in_bytes=result.swapped_in_bytes,
        gpu_attended_tokens=result.gpu_attended_tokens,
        cpu_attended_tokens=result.cpu_attended_tokens,
        host_pool_work=[
            pb.HostPoolWork(attention_ns=work.attention_ns, attended_tokens=work.attended_tokens)
            for work in result.pool_work
        ],
        not_finite_sequence_ids=result.not_finite,
        error=_ERRORS[result.error],
        error_message=result.error_message,
        trace=trace_to_message(result.trace) if result.trace else None,
    )


def tables_to_pb(tables: Tables) -> pb.OperationTables:
    return pb.OperationTables(
        linear=[pb.LinearPoint(num_tokens=n, seconds=s) for n, s in tables.linear],
        prefill=[pb.PrefillPoint(chunk_tokens=chunk, past_tokens=past, seconds=s) for chunk, past, s in tables.prefill],
        gpu_decode=[_decode_point(*point) for point in tables.gpu_decode],
        cpu_decode=[_decode_point(*point) for point in tables.cpu_decode],
        head=[pb.LinearPoint(num_tokens=n, seconds=s) for n, s in tables.head],
        swap_bytes_per_s=tables.swap_bytes_per_s,
        iteration_s=tables.iteration_s,
        cpu_copy=[pb.LinearPoint(num_tokens=n, seconds=s) for n, s in tables.cpu_copy],
        cpu_signal_s=tables.cpu_signal_s,
        cpu_pool_factors=tables.cpu_pool_factors,
        cpu_linear=[pb.LinearPoint(num_tokens=n, seconds=s) for n, s in tables.cpu_linear],
        cpu_prefill=[
            pb.PrefillPoint(chunk_tokens=chunk, past_tokens=past, seconds=s) for chunk, past, s in tables.cpu_prefill
        ],
        link_bytes_per_s=tables.link_bytes_per_s,
    )


def tables_to_json(tables: Tables) -> dict[str, Any]:
    """OperationTables in protobuf's JSON form."""
    return json_format.MessageToDict(tables_to_pb(tables), preserving_proto_field_name=True)


def tables_from_json(document: dict[str, Any]) -> Tables:
    """What `tables_to_json` made. Raises ValueError for anything else."""
    try:
        message = json_format.ParseDict(document, pb.OperationTables())
    except (json_format.ParseError, OverflowError) as error:
        raise ValueError(str(error)) from error
    tables = Tables(
        linear=tuple((p.num_tokens, p.seconds) for p in message.linear),
        prefill=tuple((p.chunk_tokens, p.past_tokens, p.seconds) for p in message.prefill),
        gpu_decode=tuple((p.num_sequences, p.context_tokens, p.seconds) for p in message.gpu_decode),
        cpu_decode=tuple((p.num_sequences, p.context_tokens, p.seconds) for p in message.cpu_decode),
        head=tuple((p.num_tokens, p.seconds) for p in message.head),
        swap_bytes_per_s=message.swap_bytes_per_s,
        iteration_s=message.iteration_s,
        cpu_copy=tuple((p.num_tokens, p.seconds) for p in message.cpu_copy),
        cpu_signal_s=message.cpu_signal_s,
        cpu_pool_factors=tuple(message.cpu_pool_factors),
        cpu_linear=tuple((p.num_tokens, p.seconds) for p in message.cpu_linear),
        cpu_prefill=tuple((p.chunk_tokens, p.past_tokens, p.seconds) for p in message.cpu_prefill),
        link_bytes_per_s=message.link_bytes_per_s,
    )
    points = (
        tables.linear,
        tables.prefill,
        tables.gpu_decode,
        tables.cpu_decode,
        tables.head,
        tables.cpu_copy,
        tables.cpu_linear,
        tables.cpu_prefill,
    )
    values = (
        tables.swap_bytes_per_s,
        tables.iteration_s,
        tables.cpu_signal_s,
        tables.link_bytes_per_s,
        *tables.cpu_pool_factors,
    )
    if not all(
        math.isfinite(v) and v >= 0 for v in (*values, *(v for table in points for point in table for v in point))
    ):
        raise ValueError("a value is negative or no number")
    if not all(point[0] >= 1 for table in points for point in table):
        raise ValueError("a point of nothing")
    if not ((tables.linear or tables.cpu_linear) and tables.head):
        raise ValueError("tables without a point")
    return tables


def _decode_point(num_sequences: int, context_tokens: int, seconds: float) -> pb.DecodePoint:
    return pb.DecodePoint(num_sequences=num_sequences, context_tokens=context_tokens, seconds=seconds)


def memory_to_pb(memory: DeviceMemory, link_bytes_per_s: float) -> pb.DeviceMemory:
    return pb.DeviceMemory(
        memory_bytes=memory.memory_bytes,
        weights_bytes=sum(memory.layer_bytes),
        layer_bytes=max(memory.layer_bytes),
        other_bytes=memory.other_bytes,
        kv_bytes=memory.kv_bytes,
        activation_bytes=memory.activation_bytes,
        graph_bytes=memory.graph_bytes,
        spare_bytes=memory.spare_bytes,
        link_bytes_per_s=link_bytes_per_s,
    )


def status_to_pb(
    status: Status, memory: pb.DeviceMemory | None, pid: int, is_stopping: bool
) -> pb.GetExecutorStatusResponse:
    return pb.GetExecutorStatusResponse(
        epoch=status.epoch,
        last_iteration=status.last_iteration,
        num_sequences=status.num_sequences,
        gpu_blocks_used=status.gpu_blocks_used,
        host_blocks_used=status.host_blocks_used,
        weight_bytes=status.weight_bytes,
        gpu_kv_bytes=status.gpu_kv_bytes,
        cpu_attention_attached=status.cpu_attention_attached,
        pid=pid,
        memory=memory,
        resident_layers=status.resident_layers,
        streamed_bytes=status.streamed_bytes,
        stopping=is_stopping,
    )
