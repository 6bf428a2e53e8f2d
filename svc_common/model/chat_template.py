"""A conversation as the model's own chat template writes it, tools and their calls included; used by the tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from jinja2 import TemplateSyntaxError


class ChatTemplateError(Exception):
    """The model has no chat template, or its template refuses the conversation. The text is the template's own."""


class ToolsUnknownError(ChatTemplateError):
    """The template knows no tools: it would leave out those that it is given."""


class ToolCallFormat(Enum):
    """How a model that was shown tools writes its calls."""

    HERMES = "hermes"
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and Hermes do."""
    LLAMA_JSON = "llama_json"
    """{"name": ..., "parameters": {...}} as the whole answer, as Llama 3.x does."""
    MISTRAL = "mistral"
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]."""


# What the templates that teach a format contain; in this order, as others' examples may hold a later one's.
_MARKS = (
    ("<tool_call>", ToolCallFormat.HERMES),
    ("[TOOL_CALLS]", ToolCallFormat.MISTRAL),
    ('"parameters": dictionary of argument name', ToolCallFormat.LLAMA_JSON),
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that an assistant's turn called."""

    id: str
    name: str
    arguments: dict[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Which call a tool's turn answers."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any] = field(hash=False)
    """JSON schema of its arguments."""


def tool_call_format(backend: Any) -> ToolCallFormat | None:
    """By the template of a transformers tokenizer; None where it teaches none of these."""
    if not backend.chat_template:
        return None
    try:
        template = backend.get_chat_template(tools=[{}])
    except ValueError:  # Several templates, and none of them the default.
        return None
    return next((found for mark, found in _MARKS if mark in template), None)


def check(backend: Any) -> None:
    """Raises ChatTemplateError where the template is no Jinja."""
    try:
        backend.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error
    except Exception:  # It may refuse this conversation for reasons of its own.
        return


def render(backend: Any, turns: Sequence[Turn], tools: Sequence[Tool] = ()) -> str:
    """Text up to where the assistant's answer begins, special tokens included. Raises ChatTemplateError.

    Templates ignore what they do not know, so tools and calls are compared with the same text without them.
    """
    if not backend.chat_template:
        raise ChatTemplateError("the model has no chat template; send text or token ids")
    text = _apply(backend, turns, tools)
    if tools and _is_text_of(text, backend, turns, ()):
        raise ToolsUnknownError("the model's chat template knows no tools")
    mute = [replace(turn, tool_calls=()) for turn in turns]
    if mute != list(turns) and _is_text_of(text, backend, mute, tools):
        raise ToolsUnknownError("the model's chat template knows no tool calls")
    return text


def _is_text_of(text: str, backend: Any, turns: Sequence[Turn], tools: Sequence[Tool]) -> bool:
    try:
        return text == _apply(backend, turns, tools)
    except ChatTemplateError:  # It misses what is left out.
        return False


def _apply(backend: Any, turns: Sequence[Turn], tools: Sequence[Tool]) -> str:
    called = {call.id: call.name for turn in turns for call in turn.tool_calls}
    try:
        text: str = backend.apply_chat_template(
            [_turn_values(turn, called) for turn in turns],
            tools=[_tool_values(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # A template is the model's own program and may fail in any way.
        raise ChatTemplateError(f"the model's chat template refuses the messages: {error}") from error
    return text


def _turn_values(turn: Turn, called: Mapping[str, str]) -> dict[str, Any]:
    """As transformers documents them. Absent fields stay away: templates ask whether a turn has tool calls.

    `called`: names of functions by the calls' ids; some templates want that of a result's.
    """
    values: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        values["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        values["tool_call_id"] = turn.tool_call_id
        if turn.tool_call_id in called:
            values["name"] = called[turn.tool_call_id]
    return values


def _tool_values(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
