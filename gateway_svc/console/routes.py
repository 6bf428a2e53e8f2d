"""What the console's paths answer: the page's files to anybody, the figures to whoever may call."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway_svc import sse
from gateway_svc.console.iterations import described, num_events
from gateway_svc.console.state import state
from gateway_svc.errors import planner_errors, translated
from gateway_svc.metrics import Outcome
from gateway_svc.planner import Planner
from neoflex.errors import NeoflexError

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PAGE = "index.html"
_HEADERS = {
    # Whatever a model writes, the page runs nothing and fetches nothing but its own files and figures.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
BURST_ITERATIONS = 8
"""Iterations that follow one another, of which a page is sent one burst at a time."""
_BURST_EVENTS = 8000
"""Ends a burst earlier, where a model has many layers."""
_PAUSE_S = 1.0
"""Between bursts, in which this page has nothing traced."""
_QUIET_S = 10.0


class Console:
    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        files = resources.files("gateway_svc.console") / "static"
        self._files = {file.name: file.read_bytes() for file in files.iterdir()}

    @property
    def open_table(self) -> list[Route]:
        """Needs no key: a page has to be there before it can ask for one."""
        return [
            Route("/" if name == _PAGE else f"/console/{name}", self.file, methods=["GET"], name=name)
            for name in sorted(self._files)
        ]

    @property
    def table(self) -> list[Route]:
        return [
            Route("/console/state", self.state, methods=["GET"]),
            Route("/console/iterations", self.iterations, methods=["GET"]),
        ]

    async def file(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2] or _PAGE
        return Response(self._files[name], headers=_HEADERS, media_type=_MEDIA_TYPES[name.rpartition(".")[2]])

    async def state(self, request: Request) -> Response:
        with planner_errors({}):
            model = await self._planner.model()
            info, load = await asyncio.gather(self._planner.server_info(), self._planner.load())
        content = sse.to_json(state(model, info, load))
        return Response(content, headers={"cache-control": "no-store"}, media_type="application/json")

    async def iterations(self, request: Request) -> ASGIApp:
        outcome: Outcome = request.state.outcome
        events = self._bursts()
        return sse.EventStream(events, {}, outcome.client_gone, events.aclose)

    async def _bursts(self) -> AsyncGenerator[bytes, None]:
        """Until the gateway stops or the planner fails, which the last event says."""
        yield sse.KEEP_ALIVE  # What the planner has to say may take a while.
        try:
            while not self._planner.is_closing:
                async with aclosing(self._burst()) as burst:
                    async for event in burst:
                        yield event
                await asyncio.sleep(_PAUSE_S)
        except NeoflexError as error:
            yield sse.error_event(translated(error, {}).body)

    async def _burst(self) -> AsyncGenerator[bytes, None]:
        num_iterations = total_events = 0
        async with aclosing(self._planner.iterations(_QUIET_S)) as traces:
            async for trace in traces:
                yield sse.event(described(trace))
                num_iterations += 1
                total_events += num_events(trace)
                if num_iterations == BURST_ITERATIONS or total_events >= _BURST_EVENTS:
                    return
        yield sse.KEEP_ALIVE
