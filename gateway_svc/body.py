"""What both generation bodies have in common, and how a body is read: strictly, every complaint naming its field.

Fields are OpenAI's where it has them, else vLLM's. A field that is null counts as absent. One that is unknown is
refused, as it may change what the answer should be; known ones that change nothing here are accepted.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from gateway_svc.errors import ApiError, invalid

MAX_CHOICES = 128
INT32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
_Body = TypeVar("_Body", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StreamOptions(Strict):
    include_usage: bool | None = None
    """A last event with the usage and without choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in each event."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against eavesdroppers; there is none here."""


class StructuredOutputs(Strict):
    """vLLM's extra: what the answer has to match. Exactly one of them."""

    json_schema: Annotated[dict[str, JsonValue] | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """EBNF with a rule named "root"."""


class GenerationBody(Strict):
    """The fields of both faces. What is absent takes the server's default; ranges are the planner's to check."""

    model: str | None = None
    """The served model's name; may be left out."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None

    # vLLM's.
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 keep all tokens."""
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    """KV of what requests begin with is shared only where this is the same."""

    # NeoFlex's.
    service_class: str | None = None

    # Of OpenAI's clients; they change nothing here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    """Nothing is ever stored."""
    service_tier: Literal["auto", "default"] | None = None


def unsound(param: str, description: str) -> PydanticCustomError:
    """Raised where fields contradict one another; `param` is the one to change."""
    return PydanticCustomError("unsound", "{description}", {"param": param, "description": description})


def read_body(kind: type[_Body], data: bytes) -> _Body:
    """Raises ApiError."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    if any(_is_null_extra(item) for item in errors):
        data = json.dumps(_without_nulls(json.loads(data))).encode()
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            errors = error.errors(include_url=False)
    raise _complaint(errors[0], data)


def _is_null_extra(item: ErrorDetails) -> bool:
    return item["type"] == "extra_forbidden" and item["input"] is None


def _without_nulls(body: Any) -> Any:
    """At the top and in messages; deeper down null may be a value, as in a JSON schema."""
    if not isinstance(body, dict):
        return body
    present = {key: value for key, value in body.items() if value is not None}
    if isinstance(messages := present.get("messages"), list):
        present["messages"] = [_without_nulls(message) for message in messages]
    return present


def _complaint(item: ErrorDetails, data: bytes) -> ApiError:
    if item["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {item['ctx']['error']}", code="invalid_json")
    if item["type"] == "unsound":
        return invalid(item["ctx"]["param"], item["ctx"]["description"])
    param = _path(item["loc"], json.loads(data))
    if not param:
        return ApiError(400, f"the body must be a JSON object, is {item['input']!r:.100}", code="invalid_json")
    match item["type"]:
        case "extra_forbidden":
            return invalid(param, "is not supported", "unknown_parameter")
        case "missing" | "union_tag_not_found":
            return invalid(param, "is required", "missing_required_parameter")
        case "too_short":
            return invalid(param, f"must have at least {item['ctx']['min_length']} item")
        case "value_error":  # One of ours.
            return invalid(param, item["msg"].removeprefix("Value error, "))
        case _:
            message = item["msg"].replace("Input should be", "must be", 1)
            return invalid(param, f"{message}, is {item['input']!r:.100}")


def _path(loc: tuple[int | str, ...], body: Any) -> str:
    """Without what pydantic puts in between: the branch of a union is no part of the body."""
    path = ""
    for place, part in enumerate(loc):
        last = place == len(loc) - 1
        if isinstance(part, int) and isinstance(body, list):
            path += f"[{part}]"
            body = body[part]
        elif isinstance(body, dict) and (part in body or last):
            path += f".{part}" if path else str(part)
            body = body.get(part)
    return path
