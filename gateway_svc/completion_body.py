"""The body of /v1/completions."""

from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from gateway_svc.body import MAX_CHOICES, GenerationBody, unsound

Prompt = str | list[int]
_MAX_TOKEN_ID = 2**31 - 1


def _prompts(value: object) -> list[Prompt]:
    """A text, tokens, or a list of either, always as a list."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]  # type: ignore[list-item]
    if isinstance(value, list) and value and all(isinstance(item, str) or _is_tokens(item) for item in value):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of either; none of them empty")


def _is_tokens(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in value)
    )


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number of tokens here; true and false are of chat completions")
    return value


class CompletionBody(GenerationBody):
    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """0 together with `echo` gives the prompt's own log-probabilities."""
    logprobs: Annotated[int | None, BeforeValidator(_no_bool), Field(ge=0, le=20)] = None
    echo: bool | None = None
    """The answer begins with the prompt."""
    best_of: int | None = None
    """No more than `n`: all that is generated is returned."""

    @model_validator(mode="after")
    def _can_be_done(self) -> "CompletionBody":
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise unsound("best_of", f"must be n, {n}, is {self.best_of}: all that is generated is returned")
        if self.max_tokens == 0 and not self.echo:
            raise unsound("max_tokens", "must be at least 1 without echo, is 0")
        if len(self.prompt) * n > MAX_CHOICES:
            num_answers = len(self.prompt) * n
            raise unsound("n", f"times the number of prompts must be at most {MAX_CHOICES}, is {num_answers}")
        return self
