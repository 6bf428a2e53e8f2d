"""Stands before all routes: ids, keys and counting; and turns every failure into a response of OpenAI's shape."""

import asyncio
import time
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc import sse, to_proto
from gateway_svc.access_log import AccessLog
from gateway_svc.context import request_id
from gateway_svc.drain import Drain
from gateway_svc.errors import ApiError
from gateway_svc.metrics import Metrics, Outcome
from svc_common.logs import log_about
from svc_common.security.api_keys import ApiKeys

_OPEN_PATHS = ("/health", "/health/ready", "/health/live")
_PROBES = (*_OPEN_PATHS, "/metrics")
"""Answered as long as the process lives."""
_RETRY_AFTER_S = 1.0


class Door:
    """An ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: ApiKeys | None,
        drain: Drain,
        access: AccessLog,
        paths: Collection[str],
        open_paths: Collection[str] = (),
    ) -> None:
        """`paths`: those that there are; all others are counted as one. `open_paths`, and health, need no key."""
        self._app = app
        self._metrics = metrics
        self._keys = keys
        self._drain = drain
        self._access = access
        self._paths = paths
        self._open_paths = {*_OPEN_PATHS, *open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        outcome = Outcome()
        own_id = request_id(headers) or to_proto.new_id("req")
        log_about(own_id)
        scope.setdefault("state", {}).update(outcome=outcome, request_id=own_id)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
                shown = MutableHeaders(scope=message)
                shown["x-request-id"] = own_id
                if self._drain.has_begun:  # The next request is for another server.
                    shown["connection"] = "close"
            await send(message)

        started_s = time.perf_counter()
        self._metrics.in_flight.inc()
        self._drain.enter()
        try:
            if self._drain.has_begun and path not in _PROBES:
                await failure(_draining())(scope, receive, send_noted)
            elif self._refuses(headers, scope):
                await failure(_no_key())(scope, receive, send_noted)
            else:
                await self._app(scope, receive, send_noted)
        except ClientDisconnect:  # Within the body.
            outcome.client_gone()
        except asyncio.CancelledError:  # The server's grace is over; the task ends here, and uvicorn hangs up.
            outcome.error = "shutdown"
        finally:
            self._metrics.in_flight.dec()
            self._drain.leave()
            route = path if path in self._paths else "other"
            # Whoever is cut off before there was a status was cut off by the server's end.
            outcome.status = outcome.status or 503
            duration_s = time.perf_counter() - started_s
            self._metrics.ended(route, scope["method"], outcome, duration_s)
            self._access.ended(route, scope["method"], outcome, duration_s)

    def _refuses(self, headers: Headers, scope: Scope) -> bool:
        # A browser asks with OPTIONS, and without a key, whether it may bring one.
        if self._keys is None or scope["path"] in self._open_paths or scope["method"] == "OPTIONS":
            return False
        return not self._keys.allows(headers.get("authorization", ""))


def _draining() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down",
        kind="service_unavailable_error",
        code="draining",
        retry_after_s=_RETRY_AFTER_S,
    )


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
