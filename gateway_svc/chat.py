"""/v1/chat/completions: a conversation in, the assistant's turn out, with calls of tools where the model makes them."""

import secrets
import string
from collections.abc import Sequence
from typing import Any

from gateway_svc import to_proto
from gateway_svc.answers import FINISH_REASONS, Asked, Entry, Piece, end_tokens
from gateway_svc.call_scanner import CallArguments, CallStart, Content
from gateway_svc.call_scanner import Piece as AnswerPiece
from gateway_svc.chat_body import ChatBody
from gateway_svc.context import RequestContext
from gateway_svc.errors import invalid
from gateway_svc.logprobs import Tokens, chat_logprobs
from gateway_svc.planner import Model
from gateway_svc.tool_calls import AnswerParser, ForcedParser, PlainParser, WholeAnswerParser, make_parser
from neoflex.v1 import inference_pb2 as pb

_ALPHANUMERIC = string.ascii_letters + string.digits


def asked(body: ChatBody, model: Model, context: RequestContext) -> Asked:
    """Raises ApiError."""
    answer_id = to_proto.new_id("chatcmpl")
    service_class = body.service_class or context.service_class
    requests = to_proto.chat_requests(body, answer_id, context.targets, service_class)
    return Asked(
        answer_id=answer_id,
        body=body,
        model=model.name,
        object_name="chat.completion",
        chunk_name="chat.completion.chunk",
        requests=requests,
        choices=[ChatChoice(index, body, model) for index in range(len(requests))],
        metadata=context.metadata,
        names=names_of(body),
        headers=_warnings(body),
    )


def names_of(body: ChatBody) -> dict[str, str]:
    """JSON fields by those of inference.proto, where this body has them under another name."""
    constraint = "tools" if body.must_call else "response_format" if body.response_format else "structured_outputs"
    return {
        "stopping.max_tokens": "max_completion_tokens" if body.max_completion_tokens else "max_tokens",
        "output.logprobs": "top_logprobs",
        "constraint": constraint,
    }


def _warnings(body: ChatBody) -> dict[str, str]:
    """A promise of OpenAI's that is not kept is said, not passed over."""
    loose = [tool.function.name for tool in body.offered_tools if tool.function.strict]
    if not loose or body.must_call:
        return {}
    return {"x-warning": f"tools: strict is kept only where tool_choice forces a call: {', '.join(loose)}"}


class ChatChoice:
    """One assistant's turn."""

    def __init__(self, index: int, body: ChatBody, model: Model) -> None:
        """Raises ApiError where the model's way to call tools is not known."""
        self._index = index
        self._parser = _parser(body, model)
        self._is_forced = body.forced_tool is not None
        self._one_call = body.parallel_tool_calls is False
        self._short_ids = model.tool_call_format == pb.TOOL_CALL_FORMAT_MISTRAL
        self._end_tokens = end_tokens(body, model)
        self._with_logprobs = bool(body.logprobs)
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text is held back."""
        self._called = False

    def begin(self) -> list[Entry]:
        return [self._entry({"role": "assistant", "content": ""})]

    def push(self, piece: Piece, tokens: Tokens) -> list[Entry]:
        positions = [item for item in piece.positions if item.chosen.token_id not in self._end_tokens]
        self._logprobs += chat_logprobs(positions, tokens)
        return self._entries(self._parser.push(piece.text))

    def end(self, finish: pb.Finish) -> list[Entry]:
        entries = self._entries(self._parser.end())
        reason = FINISH_REASONS[finish.reason]
        if reason == "stop" and self._called and not self._is_forced:  # Where it is forced, OpenAI's says "stop".
            reason = "tool_calls"
        return [*entries, {**self._entry({}), "finish_reason": reason}]

    def fold(self, entries: Sequence[Entry]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        logprobs: list[dict[str, Any]] = []
        for entry in entries:
            texts.append(entry["delta"].get("content", ""))
            for call in entry["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if entry["logprobs"]:
                logprobs += entry["logprobs"]["content"]
        text = "".join(texts)
        if text or not calls:
            message["content"] = text
        if calls:
            message["tool_calls"] = calls
        return {
            "index": self._index,
            "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if self._with_logprobs else None,
            "finish_reason": entries[-1]["finish_reason"],
        }

    def _entries(self, pieces: Sequence[AnswerPiece]) -> list[Entry]:
        return [self._entry(delta) for piece in pieces if (delta := self._delta(piece)) is not None]

    def _delta(self, piece: AnswerPiece) -> dict[str, Any] | None:
        match piece:
            case Content(text):
                return {"content": text}
            case CallStart(index, _) | CallArguments(index, _) if index and self._one_call:
                return None
            case CallStart(index, name):
                self._called = True
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": self._id(), "type": "function", "function": function}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _id(self) -> str:
        """Mistral's templates take no others than those of nine letters and digits."""
        if self._short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return to_proto.new_id("call")

    def _entry(self, delta: dict[str, Any]) -> Entry:
        logprobs = {"content": self._logprobs, "refusal": None} if self._logprobs else None
        self._logprobs = []
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _parser(body: ChatBody, model: Model) -> AnswerParser:
    names = {tool.function.name for tool in body.offered_tools}
    if body.forced_tool is not None:
        return ForcedParser(body.forced_tool)
    if body.must_call:
        return WholeAnswerParser(names, in_array=True)
    if not names:
        return PlainParser()
    if model.tool_call_format == pb.TOOL_CALL_FORMAT_UNSPECIFIED:
        raise invalid("tools", f"how {model.name} writes calls is not known; force one with tool_choice")
    return make_parser(model.tool_call_format, names)
