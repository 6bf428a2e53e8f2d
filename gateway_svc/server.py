"""The HTTP server: listens, serves, and lets running answers end when it is told to stop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from gateway_svc.app import make_app
from gateway_svc.planner import Planner
from svc_common.config import GatewayConfig
from svc_common.grpc_server import ListenError
from svc_common.telemetry.telemetry import Telemetry

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""An idle connection stays for longer than clients keep theirs (5 s in httpx), so that none is used as it closes."""


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own affair."""
        yield


class GatewayServer:
    """Started once, stopped once."""

    def __init__(
        self, config: GatewayConfig, planner_address: str, grace_s: float, telemetry: Telemetry | None = None
    ) -> None:
        """Running answers may go on for `grace_s` after `stop`. Raises KeysError."""
        self._planner = Planner(planner_address)
        self._telemetry = telemetry or Telemetry("gateway_svc")
        self._listen = config.listen
        self.address = config.listen
        settings = uvicorn.Config(
            make_app(config, self._planner, self._telemetry),
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(grace_s)),
            backlog=_BACKLOG,
        )
        self._server = _Uvicorn(settings)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accepts connections once it returns. Raises ListenError."""
        listener = listening_socket(self._listen)
        self._telemetry.start_metrics()
        if listener.family != socket.AF_UNIX:
            self.address = f"{self._listen.rpartition(':')[0]}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve([listener]))
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Takes no new connections, and returns when the running answers have ended or their time is up."""
        self._server.should_exit = True
        self._planner.end_iterations()
        if self._serving:
            await self._serving
        await self._planner.close()


def listening_socket(listen: str) -> socket.socket:
    """Bound, and not listening yet. Raises ListenError."""
    try:
        if listen.startswith("unix:"):
            path = listen.removeprefix("unix:")
            Path(path).unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(path)
        else:
            host, _, port = listen.rpartition(":")
            bare_host = host.strip("[]")
            family = socket.AF_INET6 if ":" in bare_host else socket.AF_INET
            # With the protocol by name, as asyncio turns Nagle's algorithm off for no others: headers and body of an
            # answer are two writes, and the second would wait 40 ms for the first one's acknowledgement.
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((bare_host, int(port)))
    except OSError as error:
        raise ListenError(f"cannot listen on {listen}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
