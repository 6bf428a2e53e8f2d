"""Bodies as the planner's messages: one GenerateRequest for each answer that is asked for."""

import json
import secrets
from collections.abc import Iterator

from gateway_svc.body import GenerationBody
from gateway_svc.chat_body import (
    AssistantMessage,
    ChatBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    Tool,
    ToolMessage,
)
from gateway_svc.completion_body import CompletionBody, Prompt
from gateway_svc.errors import invalid
from neoflex.v1 import inference_pb2 as pb

_SEED_MODULUS = 2**64


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def chat_requests(
    body: ChatBody, answer_id: str, targets: pb.Targets | None, service_class: str
) -> list[pb.GenerateRequest]:
    """`n` of them. Raises ApiError."""
    base = _base(body, targets, service_class)
    base.chat.CopyFrom(chat(body.messages, body.offered_tools))
    if body.most_tokens is not None:
        base.stopping.max_tokens = body.most_tokens
    if body.logprobs:
        base.output.logprobs = body.top_logprobs or 0
    _constrain_chat(base, body)
    return list(_copies(base, body, answer_id, 0))


def completion_requests(
    body: CompletionBody, answer_id: str, targets: pb.Targets | None, service_class: str
) -> list[pb.GenerateRequest]:
    """`n` for each prompt, in the order of the prompts. Raises ApiError."""
    base = _base(body, targets, service_class)
    if body.max_tokens is not None:
        # With echo, 0 asks for the prompt alone. The planner generates at least one token; it is dropped.
        base.stopping.max_tokens = max(1, body.max_tokens)
    if body.logprobs is not None:
        base.output.logprobs = body.logprobs
        if body.echo:
            base.output.prompt_logprobs = body.logprobs
    requests: list[pb.GenerateRequest] = []
    for prompt in body.prompt:
        _set_prompt(base, prompt)
        requests += _copies(base, body, answer_id, len(requests))
    return requests


def chat(messages: list[Message], tools: list[Tool]) -> pb.Chat:
    """Raises ApiError."""
    return pb.Chat(
        messages=[_turn(message) for message in messages],
        tools=[
            pb.Tool(
                name=tool.function.name,
                description=tool.function.description or "",
                parameters_json_schema="" if tool.function.parameters is None else json.dumps(tool.function.parameters),
            )
            for tool in tools
        ],
    )


def _turn(message: Message) -> pb.ChatMessage:
    turn = pb.ChatMessage(role="system" if message.role == "developer" else message.role, content=message.content or "")
    if isinstance(message, ToolMessage):
        turn.tool_call_id = message.tool_call_id
    if isinstance(message, AssistantMessage):
        for call in message.tool_calls or ():
            turn.tool_calls.add(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
    return turn


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))


def _copies(base: pb.GenerateRequest, body: GenerationBody, answer_id: str, first: int) -> Iterator[pb.GenerateRequest]:
    """Answers to one prompt differ by their seeds: given one, answer i has the i-th after it, whatever n is."""
    for index in range(body.n or 1):
        request = pb.GenerateRequest()
        request.CopyFrom(base)
        number = first + index
        request.request_id = f"{answer_id}-{number}" if number else answer_id
        if body.seed is not None:
            request.sampling.seed = (body.seed + index) % _SEED_MODULUS
        yield request


def _base(body: GenerationBody, targets: pb.Targets | None, service_class: str) -> pb.GenerateRequest:
    """All but prompt, lengths and what to report."""
    request = pb.GenerateRequest(service_class=service_class, targets=targets, cache_salt=body.cache_salt or "")
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (value := getattr(body, name)) is not None:
            setattr(request.sampling, name, value)
    if body.top_k is not None:
        request.sampling.top_k = max(0, body.top_k)
    for token, bias in (body.logit_bias or {}).items():
        if not 0 <= token < 2**31:
            raise invalid(f"logit_bias.{token}", "must be a token id")
        request.sampling.logit_bias[token] = bias
    request.stopping.stop.extend(body.stop or ())
    request.stopping.stop_token_ids.extend(body.stop_token_ids or ())
    request.stopping.ignore_eos = body.ignore_eos or False
    _set_structured_outputs(request, body)
    return request


def _set_structured_outputs(request: pb.GenerateRequest, body: GenerationBody) -> None:
    outputs = body.structured_outputs
    if outputs is None:
        return
    given = sorted(outputs.model_fields_set)
    if len(given) != 1:
        raise invalid("structured_outputs", "must be exactly one of json, json_object, regex, choice and grammar")
    if outputs.json_schema is not None:
        request.constraint.json_schema = json.dumps(outputs.json_schema)
    elif outputs.regex is not None:
        request.constraint.regex = outputs.regex
    elif outputs.choice is not None:
        request.constraint.choice.CopyFrom(pb.Choice(texts=outputs.choice))
    elif outputs.grammar is not None:
        request.constraint.ebnf = outputs.grammar
    else:
        request.constraint.json_object = True


def _constrain_chat(request: pb.GenerateRequest, body: ChatBody) -> None:
    formats = ["structured_outputs"] if request.HasField("constraint") else []
    if isinstance(body.response_format, JsonObjectFormat | JsonSchemaFormat):
        formats.append("response_format")
    if len(formats) > 1:
        raise invalid("structured_outputs", "cannot be given together with response_format")
    if formats and body.offered_tools:
        raise invalid(formats[0], 'cannot be given together with tools, unless tool_choice is "none"')
    if isinstance(body.response_format, JsonObjectFormat):
        request.constraint.json_object = True
    elif isinstance(body.response_format, JsonSchemaFormat):
        request.constraint.json_schema = json.dumps(body.response_format.json_schema.json_schema)
    elif body.must_call:
        request.constraint.json_schema = json.dumps(_call_schema(body))


def _call_schema(body: ChatBody) -> dict[str, object]:
    """Of the arguments of the one function that is named, or else of an array of calls of any."""
    parameters = {
        tool.function.name: tool.function.parameters or {"type": "object", "properties": {}}
        for tool in body.offered_tools
    }
    if body.forced_tool is not None:
        return dict(parameters[body.forced_tool])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in parameters.items()
    ]
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
