"""Responses that end with their caller: server-sent events, and work that nobody waits for any more."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

_Result = TypeVar("_Result")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class ClientGoneError(Exception):
    """The caller hung up before there was an answer."""


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def event(value: object) -> bytes:
    return f"data: {to_json(value)}\n\n".encode()


def error_event(value: object) -> bytes:
    return f"event: error\ndata: {to_json(value)}\n\n".encode()


class EventStream:
    """An ASGI response. `close` is called when it is over, and as soon as the caller hangs up."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: dict[str, str],
        on_gone: Callable[[], None],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_gone` is told that the caller hung up."""
        self._events = events
        self._on_gone = on_gone
        self._close = close
        self._headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in self._headers.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await unless_gone(receive, self._send_all(send))
        except ClientGoneError:
            self._on_gone()
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        async for events in self._events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs `work` and returns its result; cancels it and raises ClientGoneError when the caller hangs up first.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
