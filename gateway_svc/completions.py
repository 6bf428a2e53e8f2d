"""/v1/completions: prompts in, their continuations out, on request with the prompts themselves before them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway_svc import to_proto
from gateway_svc.answers import FINISH_REASONS, Asked, Entry, Piece, end_tokens
from gateway_svc.completion_body import CompletionBody, Prompt
from gateway_svc.context import RequestContext
from gateway_svc.errors import planner_errors
from gateway_svc.logprobs import CompletionLogprobs, Tokens, no_logprobs
from gateway_svc.planner import Model, Planner
from neoflex.v1 import inference_pb2 as pb

_NAMES = {"output.prompt_logprobs": "logprobs", "constraint": "structured_outputs"}


async def asked(body: CompletionBody, model: Model, context: RequestContext, planner: Planner) -> Asked:
    """Raises ApiError."""
    answer_id = to_proto.new_id("cmpl")
    service_class = body.service_class or context.service_class
    requests = to_proto.completion_requests(body, answer_id, context.targets, service_class)
    with planner_errors(_NAMES):
        echoes = await asyncio.gather(*(_echo(prompt, body, planner) for prompt in body.prompt))
    n = body.n or 1
    return Asked(
        answer_id=answer_id,
        body=body,
        model=model.name,
        object_name="text_completion",
        chunk_name="text_completion",
        requests=requests,
        choices=[CompletionChoice(index, body, model, echoes[index // n]) for index in range(len(requests))],
        metadata=context.metadata,
        names=_NAMES,
        counts_answers=body.max_tokens != 0,
    )


Echo = tuple[str, int | None]
"""A prompt's text, and its first token where log-probabilities are asked for."""


async def _echo(prompt: Prompt, body: CompletionBody, planner: Planner) -> Echo:
    """Empty where there is none. Raises NeoflexError."""
    if not body.echo:
        return "", None
    text = prompt if isinstance(prompt, str) else await planner.detokenize(prompt)
    if body.logprobs is None:
        return text, None
    token_ids = await planner.tokenize(pb.TokenizeRequest(text=prompt)) if isinstance(prompt, str) else prompt
    await planner.tokens(token_ids[:1])
    return text, token_ids[0]


class CompletionChoice:
    """One continuation."""

    def __init__(self, index: int, body: CompletionBody, model: Model, echo: Echo) -> None:
        self._index = index
        self._end_tokens = end_tokens(body, model)
        self._echo_text, self._first_token = echo
        self._with_logprobs = body.logprobs is not None
        self._logprobs = CompletionLogprobs()
        self._is_prompt_only = body.max_tokens == 0
        self._has_begun = False

    def begin(self) -> list[Entry]:
        return [self._entry(self._echo_text, None)] if self._echo_text else []

    def push(self, piece: Piece, tokens: Tokens) -> list[Entry]:
        logprobs = self._logprobs_of(piece, tokens) if self._with_logprobs else None
        text = "" if self._is_prompt_only else piece.text
        return [self._entry(text, logprobs)] if text or logprobs else []

    def end(self, finish: pb.Finish) -> list[Entry]:
        reason = "length" if self._is_prompt_only else FINISH_REASONS[finish.reason]
        return [{**self._entry("", None), "finish_reason": reason}]

    def fold(self, entries: Sequence[Entry]) -> dict[str, Any]:
        logprobs: dict[str, list[Any]] | None = None
        if self._with_logprobs:
            logprobs = no_logprobs()
            for entry in entries:
                for key, values in (entry["logprobs"] or {}).items():
                    logprobs[key] += values
        return {**entries[-1], "text": "".join(entry["text"] for entry in entries), "logprobs": logprobs}

    def _logprobs_of(self, piece: Piece, tokens: Tokens) -> dict[str, list[Any]] | None:
        """None where there is nothing new."""
        parts = []
        if not self._has_begun and self._first_token is not None:
            parts.append(self._logprobs.first_of_prompt(self._first_token, tokens))
        self._has_begun = True
        parts.append(self._logprobs.of(piece.prompt_positions, tokens))
        if not self._is_prompt_only:
            positions = [item for item in piece.positions if item.chosen.token_id not in self._end_tokens]
            parts.append(self._logprobs.of(positions, tokens))
        joined = no_logprobs()
        for part in parts:
            for key, values in part.items():
                joined[key] += values
        return joined if joined["tokens"] else None

    def _entry(self, text: str, logprobs: dict[str, list[Any]] | None) -> Entry:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}
