"""Checks what callers send and resolves every default, before it costs anything: messages in, values out.

Limits are those that proto/neoflex/v1/inference.proto states. All violations of a request are reported at once.
"""

import uuid
from dataclasses import dataclass

from neoflex.v1 import inference_pb2 as pb
from planner_svc import chat
from planner_svc.classes import ServiceClasses
from planner_svc.constraints import Constraint
from planner_svc.durations import seconds_of
from planner_svc.refusals import too_long
from planner_svc.request_class import parse_class
from planner_svc.request_constraint import parse_constraint
from planner_svc.request_sampling import check_sampling, resolve_sampling
from planner_svc.scheduler import ServiceClass, Targets
from planner_svc.violations import Violations
from svc_common.errors import invalid_argument
from svc_common.model.chat_template import Tool, Turn
from svc_common.model.no_tokenizer import NO_TOKENIZER
from svc_common.plan import Sampling

MAX_REQUEST_ID_CHARACTERS = 128
MAX_CACHE_SALT_CHARACTERS = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 1024
MAX_DETOKENIZE_TOKENS = 2**20
_MAX_TIME_LIMIT_S = 315_576_000_000  # What google.protobuf.Duration allows.


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server can take."""

    vocab_size: int
    max_sequence_tokens: int
    """Of prompt and answer together."""
    max_text_bytes: int
    """More cannot be a prompt of max_sequence_tokens, whatever the text."""
    shares_prefixes: bool = True
    """Whether requests that begin alike may share KV."""
    has_text: bool = True
    """Whether there is a tokenizer."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """A checked request beside its prompt, every default but max_tokens resolved."""

    request_id: str
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    time_limit_s: float | None
    service_class: ServiceClass
    targets: Targets | None
    """The request's own, completed by its class's."""
    cache_salt: str | None
    """None: its KV is shared with no other request."""
    constraint: Constraint | None
    """Not yet turned into sampling.grammar."""


def parse_generation(
    message: pb.GenerateRequest, limits: Limits, classes: ServiceClasses
) -> tuple[Prompt, GenerationOptions]:
    """The prompt, not yet tokenized, and the options. Raises ServiceError."""
    bad = Violations()
    bad.require(
        len(message.request_id) <= MAX_REQUEST_ID_CHARACTERS and message.request_id.isprintable(),
        "request.request_id",
        f"must be at most {MAX_REQUEST_ID_CHARACTERS} printable characters",
    )
    bad.require(
        len(message.cache_salt) <= MAX_CACHE_SALT_CHARACTERS,
        "request.cache_salt",
        f"must be at most {MAX_CACHE_SALT_CHARACTERS} characters, is {len(message.cache_salt)}",
    )
    check_sampling(message.sampling, limits.vocab_size, bad)
    _check_stopping(message.stopping, limits, bad)
    constraint = parse_constraint(message, bad)
    logprobs = _num_logprobs(message.output, "logprobs", bad)
    prompt_logprobs = _num_logprobs(message.output, "prompt_logprobs", bad)
    service_class, targets = parse_class(message, classes, bad)
    prompt = _prompt(message, "request.", limits, bad)
    bad.raise_any()
    assert prompt is not None
    stopping = message.stopping
    return prompt, GenerationOptions(
        request_id=message.request_id or uuid.uuid4().hex,
        sampling=resolve_sampling(message.sampling, logprobs, prompt_logprobs),
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        stops=tuple(stopping.stop),
        stop_token_ids=frozenset(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        time_limit_s=seconds_of(stopping.time_limit) if stopping.HasField("time_limit") else None,
        service_class=service_class,
        targets=targets,
        # Who wants log-probabilities of its prompt needs all of it computed.
        cache_salt=message.cache_salt if limits.shares_prefixes and prompt_logprobs < 0 else None,
        constraint=constraint,
    )


def parse_tokenize(message: pb.TokenizeRequest, limits: Limits) -> Prompt:
    """What to tokenize. Raises ServiceError."""
    bad = Violations()
    prompt = _prompt(message, "", limits, bad)
    bad.raise_any()
    assert prompt is not None
    return prompt


def parse_detokenize(message: pb.DetokenizeRequest, limits: Limits) -> tuple[int, ...]:
    """Token ids. Raises ServiceError."""
    bad = Violations()
    num_tokens = len(message.token_ids)
    bad.require(
        num_tokens <= MAX_DETOKENIZE_TOKENS,
        "token_ids",
        f"must be at most {MAX_DETOKENIZE_TOKENS} tokens, are {num_tokens}",
    )
    bad.raise_any()
    token_ids = tuple(message.token_ids)
    _check_token_ids(token_ids, "token_ids", limits, bad)
    bad.raise_any()
    return token_ids


def parse_abort(message: pb.AbortRequest) -> tuple[str, ...]:
    """Request ids. Raises ServiceError."""
    if not message.request_ids:
        raise invalid_argument("request_ids", "at least one is required")
    return tuple(message.request_ids)


def resolve_max_tokens(
    prompt: Prompt, num_prompt_tokens: int, max_tokens: int | None, limits: Limits, room_tokens: int
) -> int:
    """Most tokens to generate. Raises ServiceError where prompt and answer do not fit the context together.

    `room_tokens` is what the KV cache can hold of one sequence: a default never asks for more.
    """
    field = f"request.{prompt_field(prompt)}"
    if num_prompt_tokens == 0:
        raise invalid_argument(field, "must not be empty")
    limit = limits.max_sequence_tokens
    if num_prompt_tokens >= limit:
        raise too_long(field, num_prompt_tokens, limit)
    if max_tokens is None:
        return max(1, min(DEFAULT_MAX_TOKENS, min(limit, room_tokens) - num_prompt_tokens))
    if num_prompt_tokens + max_tokens > limit:
        raise invalid_argument(
            "request.stopping.max_tokens",
            f"must be at most {limit - num_prompt_tokens}, is {max_tokens}: "
            f"the prompt has {num_prompt_tokens} tokens and prompt and answer together at most {limit}",
            "CONTEXT_EXCEEDED",
        )
    return max_tokens


def prompt_field(prompt: Prompt) -> str:
    """Name of the field that a prompt came in."""
    match prompt:
        case TextPrompt():
            return "text"
        case TokenPrompt():
            return "token_ids.ids"
        case ChatPrompt():
            return "chat.messages"


def check_vocabulary(field: str, token_ids: tuple[int, ...], limits: Limits) -> None:
    """Raises ServiceError where the tokenizer knows a token that the model was never given an embedding for."""
    beyond = next((token_id for token_id in token_ids if token_id >= limits.vocab_size), None)
    if beyond is not None:
        raise invalid_argument(
            field,
            f"holds token {beyond}, which this tokenizer adds to a model that has {limits.vocab_size} tokens",
            "OUTSIDE_VOCABULARY",
        )


def _num_logprobs(output: pb.OutputOptions, name: str, bad: Violations) -> int:
    """-1 for none."""
    if not output.HasField(name):
        return -1
    value: int = getattr(output, name)
    bad.require(0 <= value <= MAX_LOGPROBS, f"request.output.{name}", f"must be in [0, {MAX_LOGPROBS}], is {value}")
    return value


def _check_stopping(options: pb.StoppingOptions, limits: Limits, bad: Violations) -> None:
    if options.HasField("max_tokens"):
        bad.require(
            options.max_tokens >= 1, "request.stopping.max_tokens", f"must be at least 1, is {options.max_tokens}"
        )
    bad.require(limits.has_text or not options.stop, "request.stopping.stop", f"must be empty: {NO_TOKENIZER}")
    bad.require(
        len(options.stop) <= MAX_STOPS,
        "request.stopping.stop",
        f"must be at most {MAX_STOPS} texts, are {len(options.stop)}",
    )
    for index, stop in enumerate(options.stop[: MAX_STOPS + 1]):
        bad.require(
            1 <= len(stop) <= MAX_STOP_CHARACTERS,
            f"request.stopping.stop[{index}]",
            f"must be of 1 to {MAX_STOP_CHARACTERS} characters, is of {len(stop)}",
        )
    num_tokens = len(options.stop_token_ids)
    bad.require(
        num_tokens <= MAX_STOP_TOKENS,
        "request.stopping.stop_token_ids",
        f"must be at most {MAX_STOP_TOKENS} tokens, are {num_tokens}",
    )
    _check_token_ids(
        tuple(options.stop_token_ids[: MAX_STOP_TOKENS + 1]), "request.stopping.stop_token_ids", limits, bad
    )
    if options.HasField("time_limit"):
        seconds = seconds_of(options.time_limit)
        bad.require(seconds > 0, "request.stopping.time_limit", f"must be greater than 0, is {seconds:g} s")
        bad.require(
            seconds <= _MAX_TIME_LIMIT_S,
            "request.stopping.time_limit",
            f"must be at most {_MAX_TIME_LIMIT_S} s, is {seconds:g} s",
        )


def _prompt(
    message: pb.GenerateRequest | pb.TokenizeRequest, prefix: str, limits: Limits, bad: Violations
) -> Prompt | None:
    """The prompt where it is sound."""
    if isinstance(message, pb.GenerateRequest):
        kind, choice, choices = message.WhichOneof("prompt"), "prompt", "text, token_ids or chat"
    else:
        kind, choice, choices = message.WhichOneof("input"), "input", "text or chat"
    if kind == "text":
        bad.require(message.text != "", f"{prefix}text", "must not be empty")
        _check_text_bytes(len(message.text.encode()), f"{prefix}text", limits, bad)
        return TextPrompt(message.text)
    if kind == "chat":
        bad.require(bool(message.chat.messages), f"{prefix}chat.messages", "at least one is required")
        _check_text_bytes(chat.text_bytes(message.chat), f"{prefix}chat.messages", limits, bad)
        turns = chat.parse_turns(message.chat, f"{prefix}chat.", bad)
        return ChatPrompt(turns, chat.parse_tools(message.chat, f"{prefix}chat.", bad))
    if kind == "token_ids" and isinstance(message, pb.GenerateRequest):
        field = f"{prefix}token_ids.ids"
        num_tokens = len(message.token_ids.ids)
        if num_tokens >= limits.max_sequence_tokens:
            raise too_long(field, num_tokens, limits.max_sequence_tokens)
        token_ids = tuple(message.token_ids.ids)
        bad.require(bool(token_ids), field, "must not be empty")
        _check_token_ids(token_ids, field, limits, bad)
        return TokenPrompt(token_ids)
    bad.require(False, f"{prefix}{choice}", f"exactly one of {choices} is required")
    return None


def _check_text_bytes(num_bytes: int, field: str, limits: Limits, bad: Violations) -> None:
    bad.require(
        num_bytes <= limits.max_text_bytes,
        field,
        f"must be at most {limits.max_text_bytes} bytes, is {num_bytes}: "
        f"more cannot fit a context of {limits.max_sequence_tokens} tokens",
    )


def _check_token_ids(token_ids: tuple[int, ...], field: str, limits: Limits, bad: Violations) -> None:
    """Names the first id out of range."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < limits.vocab_size)
        bad.require(False, f"{field}[{index}]", f"must be in [0, {limits.vocab_size}), is {token_ids[index]}")
