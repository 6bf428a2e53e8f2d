"""Bodies of /tokenize and /detokenize."""

from typing import Annotated

from pydantic import Field, model_validator

from gateway_svc.body import Strict, TokenId, unsound
from gateway_svc.chat_body import Message, Tool


class TokenizeBody(Strict):
    """A text, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise unsound("prompt", "exactly one of prompt and messages is required")
        if self.tools and self.messages is None:
            raise unsound("tools", "needs messages")
        return self


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: list[TokenId]
