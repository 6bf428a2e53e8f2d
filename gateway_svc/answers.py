"""From the planner's answers to the response: the same pieces of choices, sent as events or folded into one body."""

import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway_svc import sse
from gateway_svc.body import GenerationBody
from gateway_svc.errors import planner_errors, translated
from gateway_svc.logprobs import Positions, Tokens, token_ids_of
from gateway_svc.metrics import Outcome
from gateway_svc.planner import Metadata, Model, Planner
from gateway_svc.streams import Event, MergedStreams, whole_answers
from neoflex.errors import NeoflexError
from neoflex.v1 import inference_pb2 as pb

Entry = dict[str, Any]
"""A piece of a choice, as it stands among `choices` of an event."""
_KEEP_ALIVE_S = 10.0
"""Proxies cut a connection on which nothing comes; a request may wait in the queue for longer."""

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIME_LIMIT: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a choice is given: new text, and log-probabilities where they were asked for."""

    text: str
    positions: Positions
    prompt_positions: Positions


class Choice(Protocol):
    """One answer on its way to the caller."""

    def begin(self) -> list[Entry]: ...
    def push(self, piece: Piece, tokens: Tokens) -> list[Entry]: ...
    def end(self, finish: pb.Finish) -> list[Entry]:
        """The last entry has the finish reason."""

    def fold(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """All entries as the one choice of an unstreamed response."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of either face, ready to be sent to the planner."""

    answer_id: str
    body: GenerationBody
    model: str
    object_name: str
    chunk_name: str
    requests: Sequence[pb.GenerateRequest]
    choices: Sequence[Choice]
    """One for each request."""
    metadata: Metadata
    names: Mapping[str, str]
    """JSON fields by those of inference.proto, for complaints."""
    counts_answers: bool = True
    """False where what is generated is dropped, for only the prompt was asked for."""
    headers: dict[str, str] = field(default_factory=dict)


class Answering:
    """Answers requests through one planner."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    async def respond(self, asked: Asked, request: Request, outcome: Outcome) -> ASGIApp:
        """Raises ApiError as long as nothing was sent, and ClientGoneError."""
        if asked.body.stream:
            return await self._stream(asked, request, outcome)
        with planner_errors(asked.names):
            body = await sse.unless_gone(request.receive, self._whole(asked))
        return Response(sse.to_json(body), media_type="application/json", headers=asked.headers)

    async def _stream(self, asked: Asked, request: Request, outcome: Outcome) -> sse.EventStream:
        streams = MergedStreams(self._planner, asked.requests, asked.metadata)
        try:
            with planner_errors(asked.names):
                prompt_tokens = await sse.unless_gone(request.receive, streams.open())
        except BaseException:
            await streams.close()
            raise
        events = _Events(self, asked, streams, prompt_tokens, outcome).events()
        return sse.EventStream(events, asked.headers, outcome.client_gone, streams.close)

    async def _whole(self, asked: Asked) -> dict[str, Any]:
        responses = await whole_answers(self._planner, asked.requests, asked.metadata)
        tally = Tally(asked, [response.usage.prompt_tokens for response in responses])
        choices = []
        for index, (choice, response) in enumerate(zip(asked.choices, responses, strict=True)):
            piece = Piece(response.text, response.logprobs, response.prompt_logprobs)
            tokens = await self.tokens_of(piece)
            entries = [*choice.begin(), *choice.push(piece, tokens), *choice.end(response.finish)]
            choices.append(choice.fold(entries))
            tally.end(index, response.usage)
        return {**_head(asked, asked.object_name), "choices": choices, "usage": tally.usage()}

    async def tokens_of(self, piece: Piece) -> Tokens:
        if not (piece.positions or piece.prompt_positions):
            return {}
        return await self._planner.tokens(token_ids_of([*piece.prompt_positions, *piece.positions]))


class Tally:
    """Tokens of all answers of a request; a prompt counts once, however many answers it gets."""

    def __init__(self, asked: Asked, prompt_tokens: Sequence[int]) -> None:
        self._prompt_tokens = sum(prompt_tokens[:: asked.body.n or 1])
        self._counts_answers = asked.counts_answers
        self._answer_tokens = [0] * len(prompt_tokens)
        self._cached_tokens = [0] * len(prompt_tokens)
        self._n = asked.body.n or 1

    def push(self, index: int, num_tokens: int) -> None:
        self._answer_tokens[index] += num_tokens

    def end(self, index: int, usage: pb.Usage) -> None:
        self._answer_tokens[index] = usage.completion_tokens
        self._cached_tokens[index] = usage.cached_tokens

    def usage(self) -> dict[str, Any]:
        answers = sum(self._answer_tokens) if self._counts_answers else 0
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": answers,
            "total_tokens": self._prompt_tokens + answers,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens[:: self._n])},
        }


class _Events:
    """The events of one streamed response."""

    def __init__(
        self,
        answering: Answering,
        asked: Asked,
        streams: MergedStreams,
        prompt_tokens: Sequence[int],
        outcome: Outcome,
    ) -> None:
        options = asked.body.stream_options
        self._answering = answering
        self._asked = asked
        self._streams = streams
        self._outcome = outcome
        self._tally = Tally(asked, prompt_tokens)
        self._with_usage = bool(options and options.include_usage)
        self._usage_in_each = bool(options and options.continuous_usage_stats)
        self._head = _head(asked, asked.chunk_name)

    async def events(self) -> AsyncIterator[bytes]:
        try:
            yield b"".join(self._event(entry) for choice in self._asked.choices for entry in choice.begin())
            while not self._streams.ended:
                events = await self._streams.next_events(_KEEP_ALIVE_S)
                yield b"".join([await self._written(event) for event in events]) if events else sse.KEEP_ALIVE
            last = b""
            if self._with_usage:
                last = sse.event({**self._head, "choices": [], "usage": self._tally.usage()})
            yield last + sse.DONE
        except NeoflexError as error:
            failure = translated(error, self._asked.names)
            self._outcome.error = failure.code or "error"
            yield sse.error_event(failure.body)

    async def _written(self, event: Event) -> bytes:
        choice, what = self._asked.choices[event.index], event.what
        if isinstance(what, pb.GenerationFinished):
            self._tally.end(event.index, what.usage)
            entries = choice.end(what.finish)
        else:
            self._tally.push(event.index, len(what.token_ids))
            piece = Piece(what.text, what.logprobs, what.prompt_logprobs)
            entries = choice.push(piece, await self._answering.tokens_of(piece))
        return b"".join(map(self._event, entries))

    def _event(self, entry: Entry) -> bytes:
        chunk = {**self._head, "choices": [entry]}
        if self._usage_in_each:
            chunk["usage"] = self._tally.usage()
        elif self._with_usage:
            chunk["usage"] = None
        return sse.event(chunk)


def end_tokens(body: GenerationBody, model: Model) -> Collection[int]:
    """Those that end an answer and are no part of its text."""
    own = frozenset(body.stop_token_ids or ())
    return own if body.ignore_eos else own | model.end_token_ids


def _head(asked: Asked, object_name: str) -> dict[str, Any]:
    return {"id": asked.answer_id, "object": object_name, "created": int(time.time()), "model": asked.model}
