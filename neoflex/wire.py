"""Converts between the client library's values and protobuf; shared by the sync and the asyncio client."""

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as PbMessage

from neoflex.generation import (
    Completion,
    Delta,
    Finish,
    FinishReason,
    GenerateOptions,
    Message,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from neoflex.types import (
    CalibrationFactors,
    ClassLoad,
    Counters,
    HostPool,
    Load,
    MemoryUse,
    ModelInfo,
    ServerInfo,
    ServiceClass,
)
from neoflex.v1 import inference_pb2 as pb

_OPTIONS = frozenset(GenerateOptions.__annotations__)
_SAMPLING_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_CONSTRAINTS = ("json_schema", "json_object", "regex", "ebnf", "choice")
_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_TIME_LIMIT: FinishReason.TIME_LIMIT,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def generate_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises TypeError for an option that there is not or a prompt that is no text, and ValueError unless exactly one
    prompt is given, or where a number does not fit its field at all. The server checks everything else.
    """
    if unknown := sorted(set(options) - _OPTIONS):
        raise TypeError(f"unknown option: {', '.join(unknown)}; there are: {', '.join(sorted(_OPTIONS))}")
    token_ids, messages = options.get("token_ids"), options.get("messages")
    if prompt is not None and not isinstance(prompt, str):
        raise TypeError(f"the prompt must be a str, is a {type(prompt).__name__}; token ids go into token_ids=")
    if sum(item is not None for item in (prompt, token_ids, messages)) != 1:
        raise ValueError("give exactly one of: a prompt text, token_ids, messages")
    # The id is made up here, so that a caller can abort even before the first answer.
    request = pb.GenerateRequest(request_id=options.get("request_id") or uuid.uuid4().hex)
    if prompt is not None:
        request.text = prompt
    elif token_ids is not None:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(token_ids)
    elif messages is not None:
        request.chat.CopyFrom(chat(messages))
    for name in _SAMPLING_OPTIONS:
        _set_if_given(request.sampling, name, options.get(name))
    _set_logit_bias(request.sampling, options.get("logit_bias", {}))
    _set_constraint(request, options)
    _set_if_given(request.stopping, "max_tokens", options.get("max_tokens"))
    _set_stopping(request.stopping, options)
    _set_if_given(request.output, "logprobs", options.get("logprobs"))
    _set_if_given(request.output, "prompt_logprobs", options.get("prompt_logprobs"))
    for name in ("service_class", "cache_salt"):
        _set_if_given(request, name, options.get(name))
    _set_targets(request, options)
    return request


def _set_if_given(group: PbMessage, name: str, value: object) -> None:
    """An absent field and a zero are not the same."""
    if value is not None:
        try:
            setattr(group, name, value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error


def _set_logit_bias(sampling: pb.SamplingOptions, biases: Mapping[int, float]) -> None:
    for token_id, bias in biases.items():
        try:
            sampling.logit_bias[token_id] = bias
        except (ValueError, TypeError) as error:
            raise ValueError(f"logit_bias: {error}") from error


def _set_constraint(request: pb.GenerateRequest, options: GenerateOptions) -> None:
    given = [name for name in _CONSTRAINTS if name in options]
    if len(given) > 1:
        raise ValueError(f"give at most one of: {', '.join(given)}")
    if "json_schema" in options:
        schema = options["json_schema"]
        request.constraint.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    elif "choice" in options:
        request.constraint.choice.SetInParent()
        request.constraint.choice.texts.extend(options["choice"])
    elif given:
        _set_if_given(request.constraint, given[0], options.get(given[0]))


def _set_stopping(stopping: pb.StoppingOptions, options: GenerateOptions) -> None:
    stop = options.get("stop", ())
    stopping.stop.extend([stop] if isinstance(stop, str) else stop)
    stopping.stop_token_ids.extend(options.get("stop_token_ids", ()))
    stopping.ignore_eos = options.get("ignore_eos", False)
    if (time_limit_s := options.get("time_limit_s")) is not None:
        _set_duration(stopping.time_limit, "time_limit_s", time_limit_s)


def _set_targets(request: pb.GenerateRequest, options: GenerateOptions) -> None:
    if (ttft_s := options.get("ttft_s")) is not None:
        _set_duration(request.targets.ttft, "ttft_s", ttft_s)
    if (tpot_s := options.get("tpot_s")) is not None:
        _set_duration(request.targets.tpot, "tpot_s", tpot_s)


def _set_duration(duration: Duration, name: str, seconds: float) -> None:
    try:
        duration.FromNanoseconds(round(seconds * 1e9))
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError(f"{name}: {seconds!r:.40} is no duration") from error


def chat(messages: Sequence[Message | Mapping[str, str]]) -> pb.Chat:
    """Mappings are {"role": ..., "content": ...}."""
    turns = (item if isinstance(item, Message) else Message(**item) for item in messages)
    return pb.Chat(messages=[pb.ChatMessage(role=turn.role, content=turn.content) for turn in turns])


def tokenize_request(text: str | None, messages: Sequence[Message | Mapping[str, str]] | None) -> pb.TokenizeRequest:
    if (text is None) == (messages is None):
        raise ValueError("give exactly one of: a text, messages")
    return pb.TokenizeRequest(text=text) if messages is None else pb.TokenizeRequest(chat=chat(messages))


def completion(response: pb.GenerateResponse) -> Completion:
    return Completion(
        request_id=response.request_id,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=_logprobs(response.logprobs),
        finish=finish(response.finish),
        usage=usage(response.usage),
        prompt_logprobs=_logprobs(response.prompt_logprobs),
    )


def delta(message: pb.GenerationDelta) -> Delta:
    return Delta(
        message.text,
        tuple(message.token_ids),
        _logprobs(message.logprobs),
        _logprobs(message.prompt_logprobs),
    )


def finish(message: pb.Finish) -> Finish:
    match message.WhichOneof("matched"):
        case "stop":
            return Finish(_FINISH_REASONS[message.reason], message.stop)
        case "stop_token_id":
            return Finish(_FINISH_REASONS[message.reason], message.stop_token_id)
        case _:
            return Finish(_FINISH_REASONS[message.reason])


def usage(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        time_to_first_token_s=message.time_to_first_token_ns / 1e9,
        duration_s=message.duration_ns / 1e9,
        recomputations=message.recomputations,
        cached_tokens=message.cached_tokens,
        targets_met=message.targets_met if message.HasField("targets_met") else None,
    )


def _logprobs(positions: Iterable[pb.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(_token_logprob(position.chosen), tuple(_token_logprob(item) for item in position.top))
        for position in positions
    )


def _token_logprob(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob)


def model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        name=response.name,
        architecture=response.architecture,
        vocabulary_size=response.vocabulary_size,
        context_tokens=response.context_tokens,
        eos_token_ids=tuple(response.eos_token_ids),
        num_parameters=response.num_parameters,
        compute_dtype=response.compute_dtype,
        kv_dtype=response.kv_dtype,
        host_kv_dtype=response.host_kv_dtype,
    )


def server_info(response: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=response.version,
        uptime_s=response.uptime_s,
        device=response.device,
        block_tokens=response.block_tokens,
        block_bytes=response.block_bytes,
        host_block_bytes=response.host_block_bytes,
        gpu_blocks=response.gpu_blocks,
        host_blocks=response.host_blocks,
        cpu_attention_threads=response.cpu_attention_threads,
        cpu_attention_min_threads=response.cpu_attention_min_threads,
        cpu_attention_max_threads=response.cpu_attention_max_threads,
        counters=Counters(**{item.name: getattr(response.counters, item.name) for item in fields(Counters)}),
        service_classes=tuple(_service_class(item) for item in response.service_classes),
        host_pools=tuple(
            HostPool(**{item.name: getattr(pool, item.name) for item in fields(HostPool)})
            for pool in response.host_pools
        ),
        calibration=_calibration(response.calibration) if response.HasField("calibration") else None,
        memory_use=_memory_use(response.memory_use) if response.HasField("memory_use") else None,
        not_ready=response.not_ready,
        cpu_attention_addresses=tuple(response.cpu_attention_addresses),
    )


def _memory_use(message: pb.MemoryUse) -> MemoryUse:
    return MemoryUse(**{item.name: getattr(message, item.name) for item in fields(MemoryUse)})


def _calibration(message: pb.CalibrationFactors) -> CalibrationFactors:
    values = {item.name: getattr(message, item.name) for item in fields(CalibrationFactors)}
    return CalibrationFactors(**values | {"further_pools": dict(message.further_pools)})


def _service_class(message: pb.ServiceClass) -> ServiceClass:
    targets = message.targets if message.HasField("targets") else None
    return ServiceClass(
        name=message.name,
        is_default=message.is_default,
        ttft_s=targets.ttft.ToNanoseconds() / 1e9 if targets else None,
        tpot_s=targets.tpot.ToNanoseconds() / 1e9 if targets else None,
        priority=message.priority,
        share=message.share,
        refuses_late=message.refuses_late,
        requests_in_time=message.requests_in_time,
        requests_late=message.requests_late,
        requests_refused=message.requests_refused,
    )


def load(response: pb.GetLoadResponse) -> Load:
    values = {item.name: getattr(response, item.name) for item in fields(Load)}
    classes = tuple(ClassLoad(item.name, item.waiting_requests, item.running_requests) for item in response.classes)
    return Load(**values | {"classes": classes, "host_pool_blocks_used": tuple(response.host_pool_blocks_used)})
