"""What is asked for and what is answered, as values; `wire.py` converts them to and from protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypedDict


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """The model's end token, a stop token or a stop text."""
    LENGTH = "length"
    """max_tokens or the model's context length."""
    TIME_LIMIT = "time_limit"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. What is absent takes the server's default."""

    token_ids: Sequence[int]
    """The prompt as token ids, used as they are; in place of text."""
    messages: Sequence[Message | Mapping[str, str]]
    """The prompt as a conversation, rendered with the model's chat template; in place of text."""
    request_id: str
    """Unique among running requests; made up where absent."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    """Taken from the logits of tokens that the answer contains."""
    frequency_penalty: float
    """The same, for each time that it contains them."""
    repetition_penalty: float
    """Divides the logits of tokens that prompt or answer contain; 1 changes nothing."""
    logit_bias: Mapping[int, float]
    """Added to logits, by token id."""
    json_schema: str | Mapping[str, object] | bool
    """The answer is a JSON value that it describes. At most one of this and the next four."""
    json_object: bool
    """The answer is any JSON object."""
    regex: str
    """The whole answer matches it."""
    ebnf: str
    """The answer is of this grammar, in GBNF, with a rule named "root"."""
    choice: Sequence[str]
    """The answer is one of these texts."""
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    time_limit_s: float
    """Ends the request with the text so far; `timeout` ends it with an error."""
    cache_salt: str
    """KV is shared only with requests that have the same; "" is one, too."""
    logprobs: int
    """0 for the chosen token only, n for the n likeliest too."""
    prompt_logprobs: int
    """The same for the prompt's tokens."""
    service_class: str
    """One of the server's (`ServerInfo.service_classes`)."""
    ttft_s: float
    """Target of the time to the first token; the class's where absent."""
    tpot_s: float
    """Target of the mean time from each token to the next; the class's where absent."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """Most likely first."""


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    matched: str | int | None = None
    """The stop text, or the end or stop token, where reason is STOP."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted, and where the time went, by the server's clock."""

    prompt_tokens: int
    completion_tokens: int
    time_to_first_token_s: float
    duration_s: float
    recomputations: int
    cached_tokens: int = 0
    """Of the prompt, whose KV was found in the prefix cache."""
    targets_met: bool | None = None
    """Whether its tokens came when they were due; None where nothing was due."""

    @property
    def time_per_output_token_s(self) -> float:
        """Mean time between tokens after the first; 0 where there was at most one."""
        if self.completion_tokens < 2:
            return 0.0
        return (self.duration_s - self.time_to_first_token_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and new tokens. Text may lag behind the tokens."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """All in the first delta with a token."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish: Finish
    usage: Usage
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """One for each token of the prompt but the first, where asked for."""
