"""Each field's limits, the defaults, and that all that is wrong is said at once."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from neoflex.v1 import inference_pb2 as pb
from planner_svc import requests
from planner_svc.classes import service_classes
from planner_svc.constraints import Constraint
from planner_svc.requests import ChatPrompt, Limits, TextPrompt, TokenPrompt
from planner_svc.scheduler import Targets
from svc_common.config import PlannerConfig
from svc_common.errors import FieldViolation, ServiceError
from svc_common.model.chat_template import Tool, ToolCall, Turn
from svc_common.plan import Sampling

CHAT = {"ttft_s": 0.5, "tpot_s": 0.05}
CLASSES = service_classes(PlannerConfig.model_validate({"classes": {"default": {}, "chat": CHAT}}))
LIMITS = Limits(vocab_size=100, max_sequence_tokens=50, max_text_bytes=400)


def sound() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello")


def violations(message: pb.GenerateRequest) -> list[tuple[str, str]]:
    with pytest.raises(ServiceError) as caught:
        requests.parse_generation(message, LIMITS, CLASSES)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    return [(violation.field, violation.description) for violation in caught.value.violations]


def sampling(name: str, value: float) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: setattr(message.sampling, name, value)


def stopping(name: str, value: int) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: setattr(message.stopping, name, value)


def stops(*texts: str) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: message.stopping.stop.extend(texts)


def stop_tokens(*token_ids: int) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: message.stopping.stop_token_ids.extend(token_ids)


def time_limit(seconds: int, nanos: int = 0) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: message.stopping.time_limit.CopyFrom(Duration(seconds=seconds, nanos=nanos))


def tokens(*token_ids: int) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: message.token_ids.CopyFrom(pb.TokenIds(ids=token_ids))


def request_id(text: str) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: setattr(message, "request_id", text)


def logprobs(value: int) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: setattr(message.output, "logprobs", value)


def bias(token_id: int, value: float) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: message.sampling.logit_bias.update({token_id: value})


def constraint(**kind: Any) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: message.constraint.CopyFrom(pb.Constraint(**kind))


def choice(*texts: str) -> Callable[[pb.GenerateRequest], None]:
    return constraint(choice=pb.Choice(texts=texts))


def ignoring_eos(message: pb.GenerateRequest) -> None:
    message.constraint.json_object = message.stopping.ignore_eos = True


def targets(**seconds: float) -> Callable[[pb.GenerateRequest], None]:
    def set_targets(message: pb.GenerateRequest) -> None:
        for name, value in seconds.items():
            getattr(message.targets, name).FromNanoseconds(round(value * 1e9))

    return set_targets


BAD = {
    "temperature below": (
        sampling("temperature", -0.5),
        "request.sampling.temperature",
        "must be in [0, 100], is -0.5",
    ),
    "temperature above": (sampling("temperature", 101), "request.sampling.temperature", "must be in [0, 100], is 101"),
    "temperature nan": (
        sampling("temperature", math.nan),
        "request.sampling.temperature",
        "must be in [0, 100], is nan",
    ),
    "temperature inf": (
        sampling("temperature", math.inf),
        "request.sampling.temperature",
        "must be in [0, 100], is inf",
    ),
    "top_k": (sampling("top_k", -1), "request.sampling.top_k", "must be at least 0, is -1"),
    "top_p zero": (sampling("top_p", 0), "request.sampling.top_p", "must be in (0, 1], is 0"),
    "top_p above": (sampling("top_p", 1.5), "request.sampling.top_p", "must be in (0, 1], is 1.5"),
    "top_p nan": (sampling("top_p", math.nan), "request.sampling.top_p", "must be in (0, 1], is nan"),
    "min_p": (sampling("min_p", 1.25), "request.sampling.min_p", "must be in [0, 1], is 1.25"),
    "min_p nan": (sampling("min_p", math.nan), "request.sampling.min_p", "must be in [0, 1], is nan"),
    "presence_penalty": (
        sampling("presence_penalty", 2.5),
        "request.sampling.presence_penalty",
        "must be in [-2, 2], is 2.5",
    ),
    "frequency_penalty": (
        sampling("frequency_penalty", math.nan),
        "request.sampling.frequency_penalty",
        "must be in [-2, 2], is nan",
    ),
    "repetition_penalty": (
        sampling("repetition_penalty", 0),
        "request.sampling.repetition_penalty",
        "must be in (0, 2], is 0",
    ),
    "logit_bias": (bias(3, 101), "request.sampling.logit_bias[3]", "must be in [-100, 100], is 101"),
    "logit_bias nan": (bias(3, math.nan), "request.sampling.logit_bias[3]", "must be in [-100, 100], is nan"),
    "logit_bias token": (bias(100, 1), "request.sampling.logit_bias[100]", "its token must be in [0, 100)"),
    "logit_bias negative": (bias(-1, 1), "request.sampling.logit_bias[-1]", "its token must be in [0, 100)"),
    "prompt_logprobs": (
        lambda m: setattr(m.output, "prompt_logprobs", 21),
        "request.output.prompt_logprobs",
        "must be in [0, 20], is 21",
    ),
    "no constraint": (
        lambda m: m.constraint.SetInParent(),
        "request.constraint",
        "exactly one of json_schema, json_object, regex, ebnf or choice is required",
    ),
    "schema empty": (constraint(json_schema=""), "request.constraint.json_schema", "must not be empty"),
    "object false": (constraint(json_object=False), "request.constraint.json_object", "must be true, or absent"),
    "regex long": (
        constraint(regex="a" * 2**18),
        "request.constraint.regex",
        "must be at most 262144 bytes, is 262148",
    ),
    "no choices": (choice(), "request.constraint.choice.texts", "must be of 1 to 1024 texts, is of 0"),
    "choices many": (
        choice(*["a"] * 1025),
        "request.constraint.choice.texts",
        "must be of 1 to 1024 texts, is of 1025",
    ),
    "choice empty": (choice("a", ""), "request.constraint.choice.texts[1]", "must not be empty"),
    "constraint without end": (
        ignoring_eos,
        "request.stopping.ignore_eos",
        "must not be set with a constraint, whose end is an end token",
    ),
    "max_tokens": (stopping("max_tokens", 0), "request.stopping.max_tokens", "must be at least 1, is 0"),
    "stops": (stops(*"abcdefghijklmnopq"), "request.stopping.stop", "must be at most 16 texts, are 17"),
    "stop empty": (stops("a", ""), "request.stopping.stop[1]", "must be of 1 to 256 characters, is of 0"),
    "stop long": (stops("é" * 257), "request.stopping.stop[0]", "must be of 1 to 256 characters, is of 257"),
    "stop tokens": (stop_tokens(*[1] * 65), "request.stopping.stop_token_ids", "must be at most 64 tokens, are 65"),
    "stop token": (stop_tokens(1, 100), "request.stopping.stop_token_ids[1]", "must be in [0, 100), is 100"),
    "time_limit zero": (time_limit(0), "request.stopping.time_limit", "must be greater than 0, is 0 s"),
    "time_limit endless": (
        time_limit(2**62),
        "request.stopping.time_limit",
        "must be at most 315576000000 s, is 4.61169e+18 s",
    ),
    "time_limit negative": (
        time_limit(-1, -500_000_000),
        "request.stopping.time_limit",
        "must be greater than 0, is -1.5 s",
    ),
    "logprobs": (logprobs(21), "request.output.logprobs", "must be in [0, 20], is 21"),
    "logprobs negative": (logprobs(-1), "request.output.logprobs", "must be in [0, 20], is -1"),
    "id long": (request_id("x" * 129), "request.request_id", "must be at most 128 printable characters"),
    "id control": (request_id("a\nb"), "request.request_id", "must be at most 128 printable characters"),
    "tokens none": (tokens(), "request.token_ids.ids", "must not be empty"),
    "token negative": (tokens(1, -1), "request.token_ids.ids[1]", "must be in [0, 100), is -1"),
    "token beyond": (tokens(100), "request.token_ids.ids[0]", "must be in [0, 100), is 100"),
    "tokens many": (
        tokens(*[1] * 50),
        "request.token_ids.ids",
        "must be at most 49 tokens, is 50: the context holds 50",
    ),
    "text empty": (lambda m: setattr(m, "text", ""), "request.text", "must not be empty"),
    "text long": (
        lambda m: setattr(m, "text", "é" * 201),
        "request.text",
        "must be at most 400 bytes, is 402: more cannot fit a context of 50 tokens",
    ),
    "chat none": (lambda m: m.chat.SetInParent(), "request.chat.messages", "at least one is required"),
    "class": (
        lambda m: setattr(m, "service_class", "vip"),
        "request.service_class",
        "must be one of chat, default, is 'vip'",
    ),
    "ttft zero": (targets(ttft=0, tpot=1), "request.targets.ttft", "must be in (0, 86400] s, is 0 s"),
    "tpot negative": (targets(ttft=1, tpot=-1), "request.targets.tpot", "must be in (0, 86400] s, is -1 s"),
    "tpot long": (targets(ttft=1, tpot=86401), "request.targets.tpot", "must be in (0, 86400] s, is 86401 s"),
    "ttft alone": (
        targets(ttft=1),
        "request.targets.tpot",
        "is required beside the other target: class 'default' has none to take it from",
    ),
    "no prompt": (
        lambda m: m.ClearField("text"),
        "request.prompt",
        "exactly one of text, token_ids or chat is required",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_limit_is_kept_and_named(name: str) -> None:
    spoil, field, description = BAD[name]
    message = sound()
    spoil(message)
    assert violations(message) == [(field, description)]


def test_all_that_is_wrong_is_said_at_once() -> None:
    message = pb.GenerateRequest()
    message.sampling.top_p = 2
    message.stopping.max_tokens = -3
    assert [field for field, _ in violations(message)] == [
        "request.sampling.top_p",
        "request.stopping.max_tokens",
        "request.prompt",
    ]


def test_defaults() -> None:
    prompt, options = requests.parse_generation(sound(), LIMITS, CLASSES)
    assert prompt == TextPrompt("hello")
    seed = options.sampling.seed
    assert options.sampling == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, num_logprobs=-1)
    assert (options.max_tokens, options.stops, options.ignore_eos, options.time_limit_s) == (None, (), False, None)
    _, other = requests.parse_generation(sound(), LIMITS, CLASSES)
    assert other.sampling.seed != seed
    assert len(options.request_id) == 32
    assert other.request_id != options.request_id


def test_a_present_zero_is_no_default() -> None:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 99]), request_id="mine")
    message.sampling.temperature = 0
    message.sampling.seed = 0
    message.output.logprobs = 0
    message.stopping.time_limit.nanos = 250_000_000
    prompt, options = requests.parse_generation(message, LIMITS, CLASSES)
    assert prompt == TokenPrompt((0, 99))
    assert options.sampling == Sampling(temperature=0.0, seed=0, num_logprobs=0)
    assert (options.request_id, options.time_limit_s) == ("mine", 0.25)


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("", {}, None),
        ("default", {"ttft": 2, "tpot": 0.25}, Targets(2, 0.25)),
        ("chat", {}, Targets(0.5, 0.05)),
        ("chat", {"ttft": 2}, Targets(2, 0.05)),
        ("chat", {"tpot": 0.25}, Targets(0.5, 0.25)),
        ("chat", {"ttft": 86400, "tpot": 1e-9}, Targets(86400, 1e-9)),
    ],
)
def test_targets_are_completed_by_the_class(name: str, own: dict[str, float], expected: Targets | None) -> None:
    message = sound()
    message.service_class = name
    targets(**own)(message)
    _, options = requests.parse_generation(message, LIMITS, CLASSES)
    assert options.service_class.name == (name or "default")
    assert options.targets == expected


def test_the_edges_are_inside() -> None:
    message = sound()
    message.request_id = "é" * 128
    message.sampling.temperature = 100
    message.sampling.top_p = 1
    message.sampling.min_p = 1
    message.sampling.seed = 2**64 - 1
    message.output.logprobs = 20
    message.stopping.stop.extend(["x" * 256] * 16)
    message.stopping.stop_token_ids.extend([99] * 64)
    _, options = requests.parse_generation(message, LIMITS, CLASSES)
    assert (options.sampling.seed, options.sampling.num_logprobs) == (2**64 - 1, 20)
    assert options.stop_token_ids == {99}


def test_too_many_biases_are_refused() -> None:
    message = sound()
    message.sampling.logit_bias.update(dict.fromkeys(range(1025), 1.0))
    limits = Limits(vocab_size=2000, max_sequence_tokens=50, max_text_bytes=400)
    with pytest.raises(ServiceError) as caught:
        requests.parse_generation(message, limits, CLASSES)
    assert [(v.field, v.description) for v in caught.value.violations] == [
        ("request.sampling.logit_bias", "must be of at most 1024 tokens, is of 1025")
    ]


def test_penalties_biases_and_constraints_arrive() -> None:
    message = sound()
    message.sampling.presence_penalty = -2
    message.sampling.frequency_penalty = 2
    message.sampling.repetition_penalty = 2
    message.sampling.logit_bias.update({99: 100, 7: -100, 8: 0})
    message.output.prompt_logprobs = 0
    message.constraint.choice.texts.extend(["a", "b"])
    _, options = requests.parse_generation(message, LIMITS, CLASSES)
    sampling = options.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 2, 2)
    assert sampling.logit_bias == ((7, -100), (99, 100))
    assert sampling.num_prompt_logprobs == 0
    assert options.constraint == Constraint("choice", choices=("a", "b"))
    message.constraint.ebnf = "root ::= [a]"
    assert requests.parse_generation(message, LIMITS, CLASSES)[1].constraint == Constraint("ebnf", "root ::= [a]")


def test_a_vanishing_temperature_is_greedy() -> None:
    message = sound()
    message.sampling.temperature = 1e-30
    assert requests.parse_generation(message, LIMITS, CLASSES)[1].sampling.temperature == 0.0


def test_chat() -> None:
    message = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="anyone", content="")]))
    assert requests.parse_generation(message, LIMITS, CLASSES)[0] == ChatPrompt((Turn("anyone", ""),))


def chat_with(tools: list[pb.Tool] | None = None, **turn: Any) -> pb.GenerateRequest:
    chat = pb.Chat(messages=[pb.ChatMessage(role="assistant", **turn)], tools=tools or [])
    return pb.GenerateRequest(chat=chat)


def test_tools_and_calls() -> None:
    call = pb.ToolCall(id="1", name="add", arguments_json='{"a": [1]}')
    tools = [pb.Tool(name="add", description="Adds.", parameters_json_schema='{"type": "object"}'), pb.Tool(name="b")]
    prompt, _ = requests.parse_generation(chat_with(tools, tool_calls=[call]), LIMITS, CLASSES)
    assert prompt == ChatPrompt(
        (Turn("assistant", "", (ToolCall("1", "add", {"a": [1]}),)),),
        (Tool("add", "Adds.", {"type": "object"}), Tool("b", "", {"type": "object", "properties": {}})),
    )


@pytest.mark.parametrize(
    ("message", "field", "description"),
    [
        (
            chat_with(tool_calls=[pb.ToolCall(arguments_json="[1]")]),
            "request.chat.messages[0].tool_calls[0].arguments_json",
            "must be a JSON object",
        ),
        (
            chat_with(tool_calls=[pb.ToolCall(arguments_json="")]),
            "request.chat.messages[0].tool_calls[0].arguments_json",
            "must be a JSON object: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            chat_with([pb.Tool(name="a", parameters_json_schema="true")]),
            "request.chat.tools[0].parameters_json_schema",
            "must be a JSON object",
        ),
        (chat_with([pb.Tool()]), "request.chat.tools[0].name", "must not be empty"),
        (chat_with([pb.Tool(name="a")] * 129), "request.chat.tools", "must be at most 128, are 129"),
        (
            chat_with([pb.Tool(name="a", description="x" * 391)]),
            "request.chat.messages",
            "must be at most 400 bytes, is 401: more cannot fit a context of 50 tokens",
        ),
    ],
)
def test_tools_that_are_none(message: pb.GenerateRequest, field: str, description: str) -> None:
    with pytest.raises(ServiceError) as caught:
        requests.parse_generation(message, LIMITS, CLASSES)
    assert caught.value.violations == (FieldViolation(field, description),)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "room_tokens", "expected"),
    [
        (10, None, 1000, 40),  # what the context has room for
        (10, None, 30, 20),  # what the KV cache has room for
        (10, None, 5, 1),  # refused later, by the cache's name
        (10, 40, 5, 40),
        (49, None, 1000, 1),
    ],
)
def test_max_tokens(num_prompt_tokens: int, max_tokens: int | None, room_tokens: int, expected: int) -> None:
    got = requests.resolve_max_tokens(TextPrompt("x"), num_prompt_tokens, max_tokens, LIMITS, room_tokens)
    assert got == expected


def test_default_max_tokens_is_bounded() -> None:
    limits = Limits(vocab_size=100, max_sequence_tokens=100_000, max_text_bytes=1)
    assert requests.resolve_max_tokens(TextPrompt("x"), 10, None, limits, 100_000) == 1024


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "field", "text"),
    [
        (10, 41, "request.stopping.max_tokens", "must be at most 40, is 41"),
        (50, None, "request.text", "must be at most 49 tokens, is 50"),
        (0, None, "request.text", "must not be empty"),
    ],
)
def test_prompt_and_answer_fit_the_context(
    num_prompt_tokens: int, max_tokens: int | None, field: str, text: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        requests.resolve_max_tokens(TextPrompt("x"), num_prompt_tokens, max_tokens, LIMITS, 1000)
    [violation] = caught.value.violations
    assert violation.field == field
    assert violation.description.startswith(text)


def test_tokenize_and_detokenize_name_their_own_fields() -> None:
    with pytest.raises(ServiceError, match=r"^input: exactly one of text or chat is required$"):
        requests.parse_tokenize(pb.TokenizeRequest(), LIMITS)
    with pytest.raises(ServiceError, match=r"^text: must not be empty$"):
        requests.parse_tokenize(pb.TokenizeRequest(text=""), LIMITS)
    with pytest.raises(ServiceError, match=r"^token_ids\[1\]: must be in \[0, 100\), is 100$"):
        requests.parse_detokenize(pb.DetokenizeRequest(token_ids=[0, 100]), LIMITS)
    assert requests.parse_detokenize(pb.DetokenizeRequest(token_ids=[7]), LIMITS) == (7,)
    with pytest.raises(ServiceError, match=r"^request_ids: at least one is required$"):
        requests.parse_abort(pb.AbortRequest())
