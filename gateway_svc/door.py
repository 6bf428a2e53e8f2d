"""Stands before all routes: ids, keys and counting; and turns every failure into a response of OpenAI's shape."""

import asyncio
import time
from collections.abc import Collection

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer, use_span
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc import sse, to_proto
from gateway_svc.context import request_id
from gateway_svc.errors import ApiError
from gateway_svc.keys import ApiKeys
from gateway_svc.metrics import Metrics, Outcome
from svc_common.telemetry.propagation import headers_of, parent_of

_TRACED_PATHS = ("/v1/chat/completions", "/v1/completions")
_OPEN_PATHS = ("/health", "/health/ready", "/health/live")


class Door:
    """An ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: ApiKeys | None,
        paths: Collection[str],
        open_paths: Collection[str],
        tracer: Tracer,
    ) -> None:
        """`paths`: those that there are; all others are counted as one. `open_paths`, and health, need no key."""
        self._tracer = tracer
        self._app = app
        self._metrics = metrics
        self._keys = keys
        self._paths = paths
        self._open_paths = {*_OPEN_PATHS, *open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        outcome = Outcome()
        own_id = request_id(headers) or to_proto.new_id("req")
        span = self._start_span(headers, scope, own_id)
        scope.setdefault("state", {}).update(outcome=outcome, request_id=own_id, trace=headers_of(span))

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = own_id
            await send(message)

        started_s = time.perf_counter()
        self._metrics.num_active += 1
        try:
            # What this task logs meanwhile belongs to the span.
            with use_span(span, record_exception=False, set_status_on_exception=False):
                if self._refuses(headers, scope):
                    await failure(_no_key())(scope, receive, send_noted)
                else:
                    await self._app(scope, receive, send_noted)
        except ClientDisconnect:  # Within the body.
            outcome.client_gone()
        except asyncio.CancelledError:  # The server's grace is over; the task ends here, and uvicorn hangs up.
            outcome.error = "shutdown"
        finally:
            self._metrics.num_active -= 1
            route = path if path in self._paths else "other"
            # Whoever is cut off before there was a status was cut off by the server's end.
            outcome.status = outcome.status or 503
            self._metrics.ended(route, scope["method"], outcome, time.perf_counter() - started_s)
            _end_span(span, outcome)

    def _start_span(self, headers: Headers, scope: Scope, own_id: str) -> Span:
        """Of what generates; of the rest there are only the metrics."""
        method, path = scope["method"], scope["path"]
        if path not in _TRACED_PATHS:
            return INVALID_SPAN
        attributes = {"http.request.method": method, "http.route": path, "url.path": path, "url.scheme": "http"}
        attributes["neoflex.request_id"] = own_id
        return self._tracer.start_span(f"{method} {path}", parent_of(headers.items()), SpanKind.SERVER, attributes)

    def _refuses(self, headers: Headers, scope: Scope) -> bool:
        # A browser asks with OPTIONS, and without a key, whether it may bring one.
        if self._keys is None or scope["path"] in self._open_paths or scope["method"] == "OPTIONS":
            return False
        return not self._keys.allows(headers.get("authorization", ""))


def _end_span(span: Span, outcome: Outcome) -> None:
    if span.is_recording():
        span.set_attribute("http.response.status_code", outcome.status)
        if outcome.error:
            span.set_attribute("error.type", outcome.error)
        if outcome.status >= 500:
            span.set_status(Status(StatusCode.ERROR, outcome.error))
        span.end()


def _no_key() -> ApiError:
    return ApiError(
        401,
        "no valid API key; send one in the header: Authorization: Bearer KEY",
        kind="authentication_error",
        code="invalid_api_key",
    )


def failure(error: ApiError) -> Response:
    return Response(sse.to_json(error.body), error.status, error.headers, "application/json")


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.outcome.error = error.code or str(error.status)
    return failure(error)


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Before there was an answer; nobody receives this one."""
    request.state.outcome.client_gone()
    return Response(status_code=request.state.outcome.status)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths, and methods that a path does not have."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    response = failure(ApiError(error.status_code, f"{error.detail}: {where:.200}"))
    response.headers.update(error.headers or {})
    return response


async def on_bug(request: Request, error: Exception) -> Response:
    """What nobody foresaw; starlette raises it again behind the response, and uvicorn logs it."""
    request.state.outcome.error = "internal"
    return failure(ApiError(500, "internal error; the gateway's log has the details", kind="server_error"))
