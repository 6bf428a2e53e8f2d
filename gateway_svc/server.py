"""The HTTP server: listens, serves, and lets running answers end when it is told to stop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import uvicorn

from gateway_svc.access import Access
from gateway_svc.access_log import AccessLog
from gateway_svc.app import make_app
from gateway_svc.drain import Drain
from gateway_svc.planner import Planner
from svc_common.config import GatewayConfig
from svc_common.grpc_server import ListenError
from svc_common.security.sockets import open_to_group, private_files
from svc_common.telemetry.telemetry import Telemetry

_BACKLOG = 2048
_MAX_HEADER_BYTES = 64 * 2**10
"""All of a request's headers together."""
_LOOK_EVERY_S = 0.1
"""At the planner, while both may be draining."""
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
        self,
        config: GatewayConfig,
        planner_address: str,
        grace_s: float,
        *,
        access: Access | None = None,
        has_access_log: bool = True,
        telemetry: Telemetry | None = None,
    ) -> None:
        """Running answers may go on for `grace_s` after `stop`. Raises ConfigError."""
        access = access or Access()
        self._planner = Planner(planner_address, access.tls, access.planner_key)
        self._drain = Drain()
        self._grace_s = grace_s
        self._min_drain_s = config.min_drain_s
        self._telemetry = telemetry or Telemetry("gateway_svc")
        self._listen = config.listen
        self._socket_group = access.socket_group
        context = access.https.ssl_context(config.client_certificates) if access.https else None
        self.address = config.listen
        settings = uvicorn.Config(
            make_app(config, self._planner, self._drain, AccessLog(has_access_log), self._telemetry),
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,  # `stop` has waited for all answers by then.
            backlog=_BACKLOG,
            http="h11",  # The limit is one that it knows.
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            ssl_context_factory=(lambda config, default: context) if context else None,
        )
        self._server = _Uvicorn(settings)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accepts connections once it returns. Raises ListenError."""
        listener = listening_socket(self._listen, self._socket_group)
        self._telemetry.start_metrics()
        if listener.family != socket.AF_UNIX:
            self.address = f"{self._listen.rpartition(':')[0]}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve([listener]))
        await self._server.listening.wait()

    @property
    def num_running(self) -> int:
        """HTTP requests in hand."""
        return self._drain.num_running

    async def stop(self) -> None:
        """Refuses new requests, and returns when the running answers have ended or their time is up.

        Whoever calls meanwhile is told so: until the planner, too, has drained, see `gateway.min_drain_s`.
        """
        self._drain.begin()
        self._planner.end_iterations()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                await self._until_callers_know()
                await self._drain.idle()
        self._server.should_exit = True
        if self._serving:
            await self._serving
        await self._planner.close()

    async def _until_callers_know(self) -> None:
        """A refused connection says neither that the server drains nor when to come back."""
        end_s = monotonic() + self._min_drain_s
        while monotonic() < end_s or not await self._planner.is_ready():
            if not await self._planner.is_there():
                return
            await asyncio.sleep(_LOOK_EVERY_S)


def listening_socket(listen: str, socket_group: int | None = None) -> socket.socket:
    """Bound, and not listening yet. Raises ListenError."""
    try:
        if listen.startswith("unix:"):
            path = listen.removeprefix("unix:")
            Path(path).unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with private_files():
                listener.bind(path)
            open_to_group(Path(path), socket_group)
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
