"""What each path answers."""

import time
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway_svc import chat, completions, sse, to_proto
from gateway_svc.answers import Answering
from gateway_svc.body import Strict, read_body
from gateway_svc.chat_body import ChatBody
from gateway_svc.completion_body import CompletionBody
from gateway_svc.context import read_headers
from gateway_svc.drain import Drain
from gateway_svc.errors import ApiError, planner_errors
from gateway_svc.metrics import Metrics, Outcome
from gateway_svc.planner import Model, Planner
from gateway_svc.small_bodies import DetokenizeBody, TokenizeBody
from neoflex.errors import NeoflexError
from neoflex.v1 import inference_pb2 as pb

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_Body = TypeVar("_Body", bound=Strict)


class Routes:
    """The handlers. `request.state` has `outcome` and `request_id`, by the Door."""

    def __init__(self, planner: Planner, metrics: Metrics, max_body_bytes: int, drain: Drain) -> None:
        self._planner = planner
        self._drain = drain
        self._metrics = metrics
        self._answering = Answering(planner, metrics)
        self._max_body_bytes = max_body_bytes
        self._started_s = int(time.time())

    @property
    def table(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.ready, methods=["GET"]),
            Route("/health/ready", self.ready, methods=["GET"]),
            Route("/health/live", self.live, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def chat_completions(self, request: Request) -> ASGIApp:
        body, model = await self._read(request, ChatBody)
        outcome: Outcome = request.state.outcome
        asked = chat.asked(body, model, read_headers(request.headers, request.state.request_id))
        outcome.operation, outcome.model = "chat", model.name
        return await self._answering.respond(asked, request, outcome)

    async def completions(self, request: Request) -> ASGIApp:
        body, model = await self._read(request, CompletionBody)
        outcome: Outcome = request.state.outcome
        context = read_headers(request.headers, request.state.request_id)
        asked = await completions.asked(body, model, context, self._planner)
        outcome.operation, outcome.model = "text_completion", model.name
        return await self._answering.respond(asked, request, outcome)

    async def models(self, request: Request) -> Response:
        with planner_errors({}):
            model = await self._planner.model()
        return _json({"object": "list", "data": [self._described(model)]})

    async def model(self, request: Request) -> Response:
        with planner_errors({}):
            model = await self._planner.model()
        _check_name(request.path_params["name"], model)
        return _json(self._described(model))

    async def tokenize(self, request: Request) -> Response:
        body, model = await self._read(request, TokenizeBody)
        message = pb.TokenizeRequest()
        if body.messages is None:
            message.text = body.prompt or ""
        else:
            message.chat.CopyFrom(to_proto.chat(body.messages, body.tools or []))
        with planner_errors({}):
            tokens = await self._planner.tokenize(message)
        return _json({"count": len(tokens), "max_model_len": model.context_tokens, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body, _ = await self._read(request, DetokenizeBody)
        with planner_errors({"token_ids": "tokens"}):
            return _json({"prompt": await self._planner.detokenize(body.tokens)})

    async def live(self, request: Request) -> Response:
        """This process answers, whatever the planner does: restarting it would not help."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if not self._drain.has_begun and await self._planner.is_ready():
            return _json({"status": "ok"})
        raise ApiError(
            503, "the server is not ready", kind="service_unavailable_error", code="not_ready", retry_after_s=1
        )

    async def metrics(self, request: Request) -> Response:
        try:
            server = await self._planner.server_info(), await self._planner.load()
        except NeoflexError:
            return Response(self._metrics.exposition(None), media_type=_PROMETHEUS)
        return Response(self._metrics.exposition(server), media_type=_PROMETHEUS)

    async def _read(self, request: Request, kind: type[_Body]) -> tuple[_Body, Model]:
        """The body, for the model that is served. Raises ApiError."""
        body = read_body(kind, await self._body_bytes(request))
        with planner_errors({}):
            model = await self._planner.model()
        name: str | None = getattr(body, "model", None)
        if name is not None:
            _check_name(name, model)
        return body, model

    async def _body_bytes(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        too_large = ApiError(413, f"the body must be at most {self._max_body_bytes} bytes", code="body_too_large")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise too_large
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._max_body_bytes:
                raise too_large
        return bytes(data)

    def _described(self, model: Model) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "neoflex",
            "max_model_len": model.context_tokens,
        }


def _check_name(name: str, model: Model) -> None:
    if name != model.name:
        raise ApiError(
            404,
            f"model: {name!r:.200} is not served here; {model.name!r} is",
            code="model_not_found",
            param="model",
        )


def _json(value: object) -> Response:
    return Response(sse.to_json(value), media_type="application/json")
