"""One request between its acceptance and its end: the engine puts tokens in, one servicer coroutine takes them out."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum

from planner_svc.request_span import RequestSpan
from planner_svc.scheduler import History, ServiceClass, Targets
from planner_svc.text import AnswerText
from svc_common.errors import ServiceError
from svc_common.model.tokenizer import Tokenizer
from svc_common.plan import PromptLogprobs, Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the engine is asked to generate, checked and with every default resolved."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    end_token_ids: frozenset[int]
    """The model's own unless ignored, and the caller's."""
    time_limit_s: float | None
    """From arrival."""
    arrival_ns: int
    """time.monotonic_ns() when the call came in."""
    service_class: ServiceClass
    targets: Targets | None
    cache_salt: str | None
    """None: its KV is shared with no other request."""
    span: RequestSpan


class EndReason(Enum):
    END_TOKEN = "end_token"
    STOP_TEXT = "stop_text"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    ABORT = "abort"

    @property
    def word(self) -> str:
        """As OpenAI's clients and dashboards know it: what the model or the caller ended is all "stop"."""
        return "stop" if self in (EndReason.END_TOKEN, EndReason.STOP_TEXT) else self.value


@dataclass(frozen=True, slots=True)
class Position:
    """A token and its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new since the delta before."""

    text: str
    token_ids: tuple[int, ...]
    positions: tuple[Position, ...]
    """One per token, where log-probabilities were asked for."""
    prompt_positions: tuple[Position, ...] = ()
    """One for each token of the prompt but the first, where asked for; with the first token."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a request ended, and what it took."""

    reason: EndReason
    matched: str | int | None
    """The stop text or end token, where one ended it."""
    prompt_tokens: int
    completion_tokens: int
    time_to_first_token_ns: int
    """0 where there was no token."""
    duration_ns: int
    recomputations: int
    cached_tokens: int
    ttft_met: bool | None
    """None without targets, or where it ended before its first token was due without one."""
    tpot_met: bool | None
    """None without targets, or without a second token."""

    @property
    def targets_met(self) -> bool | None:
        """Both; None where nothing was due."""
        return self.ttft_met and self.tpot_met is not False


@dataclass(frozen=True, slots=True)
class Marks:
    """How far a request got. Times are those of CLOCK_MONOTONIC, in ns; 0 for what did not happen."""

    planned_ns: int
    """When a plan had it for the first time."""
    first_token_ns: int
    last_token_ns: int
    num_tokens: int
    text: str
    """Of the answer so far, where the request's span captures it."""


class Generation:
    """Deltas wait here until they are taken and are merged meanwhile, so a slow reader holds up nobody."""

    def __init__(self, request: GenerationRequest, sequence_id: int, tokenizer: Tokenizer) -> None:
        self.request = request
        self.sequence_id = sequence_id
        self._answer = AnswerText(tokenizer, request.stops)
        self._text: list[str] = []
        self._captured: list[str] = []
        self._captures = request.span.captures_content
        self._token_ids: list[int] = []
        self._positions: list[Position] = []
        self._prompt_positions: list[Position] = []
        self._num_prompt_positions = 0
        self._num_tokens = 0
        self._planned_ns = 0
        self._first_token_ns = 0
        self.last_token_ns = 0
        """time.monotonic_ns() when the latest token came; 0 before the first."""
        self._outcome: Finished | ServiceError | None = None
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    # --- the engine's side

    def note_planned(self, now_ns: int) -> None:
        """A plan has it."""
        self._planned_ns = self._planned_ns or now_ns

    @property
    def marks(self) -> Marks:
        return Marks(
            self._planned_ns, self._first_token_ns, self.last_token_ns, self._num_tokens, "".join(self._captured)
        )

    def push(self, token_id: int, logprobs: TokenLogprobs | None, is_end: bool, now_ns: int) -> str | None:
        """Takes a token; returns the stop text it completes. An end token counts but adds no text."""
        if not self._num_tokens:
            self._first_token_ns = now_ns
        self._num_tokens += 1
        self.last_token_ns = now_ns
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._positions.append(Position(token_id, logprobs))
        if not is_end:
            self._add_text(self._answer.push(token_id))
        self._changed.set()
        return self._answer.matched

    def _add_text(self, text: str) -> None:
        self._text.append(text)
        if self._captures:
            self._captured.append(text)

    def push_prompt(self, part: PromptLogprobs) -> None:
        """Takes log-probabilities of the prompt; those that came before a recomputation come again, and are dropped."""
        prompt = self.request.prompt
        for index in range(1 + self._num_prompt_positions - part.start, len(part)):
            self._prompt_positions.append(Position(prompt[part.start + index], part.position(index)))
            self._num_prompt_positions += 1

    def finish(self, reason: EndReason, matched: str | int | None, history: History, now_ns: int) -> None:
        """Ends it well; text that was held back goes out unless it is the stop text."""
        self._add_text(self._answer.rest())
        arrival_ns = self.request.arrival_ns
        ttft_met, tpot_met = self._met_targets(now_ns)
        self._end(
            Finished(
                reason=reason,
                matched=matched,
                prompt_tokens=len(self.request.prompt),
                completion_tokens=self._num_tokens,
                time_to_first_token_ns=self._first_token_ns - arrival_ns if self._num_tokens else 0,
                duration_ns=now_ns - arrival_ns,
                recomputations=history.num_recomputations,
                cached_tokens=history.num_cached_tokens,
                ttft_met=ttft_met,
                tpot_met=tpot_met,
            )
        )

    def _met_targets(self, now_ns: int) -> tuple[bool | None, bool | None]:
        """TTFT's and TPOT's."""
        targets, arrival_ns = self.request.targets, self.request.arrival_ns
        if targets is None:
            return None, None
        if not self._num_tokens:
            return False if now_ns - arrival_ns > targets.ttft_s * 1e9 else None, None
        in_time = self._first_token_ns - arrival_ns <= targets.ttft_s * 1e9
        if self._num_tokens == 1:
            return in_time, None
        follow_ns = self.last_token_ns - self._first_token_ns
        return in_time, follow_ns <= targets.tpot_s * 1e9 * (self._num_tokens - 1)

    def fail(self, error: ServiceError) -> None:
        """Ends it with an error, after the deltas so far."""
        self._end(error)

    def _end(self, outcome: Finished | ServiceError) -> None:
        self._outcome = outcome
        self._changed.set()
        self._ended.set()

    # --- the servicer's side

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is generated, as it comes. Raises ServiceError where the request failed."""
        while True:
            delta = self._take()
            if delta.token_ids or delta.text:
                yield delta
            elif self._outcome is None:
                await self._changed.wait()
                self._changed.clear()
            else:
                self._raise_failure()
                return

    async def whole(self) -> Delta:
        """The whole answer, once it has ended. Raises ServiceError where the request failed."""
        await self._ended.wait()
        self._raise_failure()
        return self._take()

    @property
    def finished(self) -> Finished:
        """How it ended; to be asked for after the last delta."""
        assert isinstance(self._outcome, Finished)
        return self._outcome

    def _take(self) -> Delta:
        # The last of them comes with the first token.
        prompt_positions = tuple(self._prompt_positions) if self._token_ids else ()
        delta = Delta("".join(self._text), tuple(self._token_ids), tuple(self._positions), prompt_positions)
        if prompt_positions:
            self._prompt_positions.clear()
        self._text.clear()
        self._token_ids.clear()
        self._positions.clear()
        return delta

    def _raise_failure(self) -> None:
        if isinstance(self._outcome, ServiceError):
            raise self._outcome
