"""Turns what the engine says into the messages of inference.proto."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from neoflex.v1 import inference_pb2 as pb
from planner_svc.classes import ServiceClasses
from planner_svc.counters import ClassCounters, Counters, Load
from planner_svc.estimator import Factors
from planner_svc.executor_client import Placement
from planner_svc.generation import Delta, EndReason, Finished, Position
from planner_svc.scheduler import Counters as SchedulerCounters
from planner_svc.scheduler import Targets
from svc_common.model.chat_template import ToolCallFormat
from svc_common.model.tokenizer import Tokenizer

_REASONS = {
    EndReason.END_TOKEN: pb.FINISH_REASON_STOP,
    EndReason.STOP_TEXT: pb.FINISH_REASON_STOP,
    EndReason.LENGTH: pb.FINISH_REASON_LENGTH,
    EndReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    EndReason.ABORT: pb.FINISH_REASON_ABORT,
}

_TOOL_CALL_FORMATS = {
    None: pb.TOOL_CALL_FORMAT_UNSPECIFIED,
    ToolCallFormat.HERMES: pb.TOOL_CALL_FORMAT_HERMES,
    ToolCallFormat.LLAMA_JSON: pb.TOOL_CALL_FORMAT_LLAMA_JSON,
    ToolCallFormat.MISTRAL: pb.TOOL_CALL_FORMAT_MISTRAL,
}


def tool_call_format_value(call_format: ToolCallFormat | None) -> pb.ToolCallFormat:
    return _TOOL_CALL_FORMATS[call_format]


def token_message(tokenizer: Tokenizer, token_id: int) -> pb.TokenText:
    text = tokenizer.token_bytes(token_id)
    return pb.TokenText(text=text) if text else pb.TokenText(special=tokenizer.token_name(token_id))


def delta_message(delta: Delta) -> pb.GenerationDelta:
    return pb.GenerationDelta(
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=position_messages(delta.positions),
        prompt_logprobs=position_messages(delta.prompt_positions),
    )


def position_messages(positions: Iterable[Position]) -> list[pb.PositionLogprobs]:
    return [
        pb.PositionLogprobs(
            chosen=pb.TokenLogprob(token_id=position.token_id, logprob=position.logprobs.chosen),
            top=[pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in position.logprobs.top],
        )
        for position in positions
    ]


def finish_message(finished: Finished) -> pb.Finish:
    reason = _REASONS[finished.reason]
    if isinstance(finished.matched, str):
        return pb.Finish(reason=reason, stop=finished.matched)
    if finished.matched is not None:
        return pb.Finish(reason=reason, stop_token_id=finished.matched)
    return pb.Finish(reason=reason)


def usage_message(finished: Finished) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.completion_tokens,
        time_to_first_token_ns=finished.time_to_first_token_ns,
        duration_ns=finished.duration_ns,
        recomputations=finished.recomputations,
        cached_tokens=finished.cached_tokens,
        targets_met=finished.targets_met,
    )


def calibration_message(factors: Factors) -> pb.CalibrationFactors:
    return pb.CalibrationFactors(**asdict(factors))


def counters_message(counters: Counters, scheduler: SchedulerCounters) -> pb.ServerCounters:
    return pb.ServerCounters(
        gpu_only_iterations=scheduler.gpu_only_iterations,
        asymmetric_iterations=scheduler.asymmetric_iterations,
        same_layer_iterations=scheduler.same_layer_iterations,
        decoupled_iterations=scheduler.decoupled_iterations,
        gpu_attended_tokens=counters.gpu_attended_tokens,
        cpu_attended_tokens=counters.cpu_attended_tokens,
        swapped_out_bytes=counters.swapped_out_bytes,
        swapped_in_bytes=counters.swapped_in_bytes,
        preemptions=scheduler.preemptions,
        recomputed_tokens=scheduler.recomputed_tokens,
        prefilled_tokens=scheduler.prefilled_tokens,
        cached_tokens=scheduler.cached_tokens,
        generated_tokens=scheduler.generated_tokens,
        accepted_requests=counters.accepted_requests,
        finished_requests=counters.finished_requests,
        refused_requests=counters.refused_requests,
        executor_busy_ns=counters.executor_busy_ns,
        cpu_wait_ns=counters.cpu_wait_ns,
        cpu_attention_ns=counters.cpu_attention_ns,
        planning_ns=counters.planning_ns,
        cpu_threads_grown=counters.cpu_threads_grown,
        cpu_threads_shrunk=counters.cpu_threads_shrunk,
        stalls=counters.stalls,
        executor_losses=counters.executor_losses,
    )


def pool_messages(placement: Placement) -> list[pb.HostPoolInfo]:
    """In the order of the configuration."""
    return [
        pb.HostPoolInfo(
            num_blocks=pool.num_blocks,
            num_threads=pool.num_threads,
            min_threads=(pool.thread_limits or (0, 0))[0],
            max_threads=(pool.thread_limits or (0, 0))[1],
            error=pool.error,
        )
        for pool in placement.pools
    ]


def memory_message(placement: Placement) -> pb.MemoryUse:
    return pb.MemoryUse(
        device_weight_bytes=placement.weight_bytes,
        device_buffer_bytes=placement.buffer_bytes,
        device_kv_bytes=placement.gpu_kv_bytes,
        host_weight_bytes=placement.host_weight_bytes,
        host_kv_bytes=placement.host_kv_bytes,
        device_activation_bytes=placement.memory.activation_bytes if placement.memory else 0,
        device_graph_bytes=placement.memory.graph_bytes if placement.memory else 0,
        device_memory_bytes=placement.memory.memory_bytes if placement.memory else 0,
    )


def load_message(load: Load) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(
        waiting_requests=load.num_waiting,
        running_requests=load.num_running,
        max_waiting_requests=load.max_waiting,
        gpu_blocks_used=load.gpu_blocks_used,
        gpu_blocks_total=load.gpu_blocks,
        host_blocks_used=load.host_blocks_used,
        host_blocks_total=load.host_blocks,
        host_pool_blocks_used=load.pool_blocks_used,
        classes=[
            pb.ClassLoad(name=item.name, waiting_requests=item.num_waiting, running_requests=item.num_running)
            for item in load.classes
        ],
    )


def class_messages(classes: ServiceClasses, counters: Mapping[str, ClassCounters]) -> list[pb.ServiceClass]:
    """By name."""
    return [
        pb.ServiceClass(
            name=name,
            is_default=item is classes.default,
            targets=targets_message(item.targets) if item.targets else None,
            priority=item.priority,
            share=item.share,
            refuses_late=item.refuses_late,
            requests_in_time=counters[name].in_time,
            requests_late=counters[name].late,
            requests_refused=counters[name].refused,
        )
        for name, item in sorted(classes.by_name.items())
    ]


def targets_message(targets: Targets) -> pb.Targets:
    message = pb.Targets()
    message.ttft.FromNanoseconds(round(targets.ttft_s * 1e9))
    message.tpot.FromNanoseconds(round(targets.tpot_s * 1e9))
    return message
