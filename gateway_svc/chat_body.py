"""The body of /v1/chat/completions."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, PlainValidator, model_validator

from gateway_svc.body import Count, GenerationBody, Strict, unsound

FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


def _text(value: object) -> object:
    """Parts of text are joined by newlines."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f'only parts of type "text" are supported, is {kind!r:.100}')
        texts.append(part["text"])
    return "\n".join(texts)


Text = Annotated[str, BeforeValidator(_text)]
OptionalText = Annotated[str | None, BeforeValidator(_text)]


class FunctionCall(Strict):
    name: str
    arguments: str
    """A JSON object, as text."""


class AssistantToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class _Message(Strict):
    name: str | None = None
    """Of the speaker. Not shown to the model; a tool's turn is given the name of the function that was called."""


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: Text


class UserMessage(_Message):
    role: Literal["user"]
    content: Text


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: OptionalText = None
    tool_calls: list[AssistantToolCall] | None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    """As OpenAI's answers have them, which are sent back as they came."""


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Text
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """Arguments match the schema exactly. Kept where a call is forced, else the answer's header says that it is not."""


class Tool(Strict):
    type: Literal["function"]
    function: Function


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one that must be called."""

    name: str


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, JsonValue], Field(alias="schema")]
    strict: bool | None = None
    """Answers always match, whatever is said here."""


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def _tool_choice(value: object) -> object:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedTool(name)
        case _:
            raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """The same under its newer name."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | None, PlainValidator(_tool_choice)] = None
    """Default: "auto" where there are tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in an answer."""
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> "ChatBody":
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise unsound("max_tokens", "differs from max_completion_tokens; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise unsound("top_logprobs", "needs logprobs to be true")
        if self.tools == []:
            raise unsound("tools", "must not be empty; leave it out")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise unsound("tools", "must have different names")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise unsound("tool_choice", "needs tools")
        if self.forced_tool is not None and self.forced_tool not in names:
            raise unsound("tool_choice", f"must name one of the tools, is {self.forced_tool!r:.100}")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[Tool]:
        """Those that the model is shown."""
        return [] if self.tool_choice == "none" or self.tools is None else self.tools

    @property
    def forced_tool(self) -> str | None:
        """Name of the one that must be called."""
        return self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or self.forced_tool is not None
