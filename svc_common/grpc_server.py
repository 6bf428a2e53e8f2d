"""How every service answers gRPC: who may call, message limits, keep-alive, errors, health, reflection, drain."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from svc_common.errors import ErrorInterceptor
from svc_common.security.api_keys import ApiKeyInterceptor
from svc_common.security.door import Door

MAX_MESSAGE_BYTES = 64 * 2**20
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients that ping a quiet stream every 10 s must not be cut off.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A process that is frozen breaks no connection. gRPC's own threads answer pings, so a busy one does answer.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Those that gRPC sends to size its windows; a keep-alive ping waits for their answer.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # No limit: a long iteration is a quiet stream.
]
LIVENESS = "liveness"
READINESS = "readiness"

logger = logging.getLogger(__name__)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ListenError(Exception):
    """An address can't be had: taken, not this machine's, or no name at all."""


class GrpcServer:
    """A grpc.aio server with `grpc.health.v1` and reflection.

    Health names: "" and each service follow readiness; "liveness" and "readiness" can be asked for by name.
    """

    def __init__(self, listen: str, service_names: Sequence[str], door: Door | None = None) -> None:
        """`listen` is `host:port` or `unix:path`; port 0 takes a free one. `service_names` are full gRPC names."""
        self._door = door or Door()
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]  # type: ignore[type-arg]
        if self._door.keys:
            interceptors.append(ApiKeyInterceptor(self._door.keys))
        options = [*_OPTIONS, ("grpc.max_concurrent_streams", self._door.max_streams)]
        self._server = grpc.aio.server(options=options, interceptors=interceptors)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the type stubs lack it
        self._service_names = list(service_names)
        self._listen = listen
        self._ready: bool | None = None
        self._alive: bool | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        self.address = listen

    def register(self, add_to_server: Callable[..., None], servicer: object) -> None:
        """`add_to_server` is a generated `add_XServicer_to_server`."""
        add_to_server(servicer, self._server)

    async def start(self) -> None:
        """Listens; not ready yet. Raises ListenError, and ConfigError where TLS can't be had."""
        try:
            port = self._door.open(self._server, self._listen)
        except (RuntimeError, OSError) as error:
            raise ListenError(f"cannot listen on {self._listen}") from error
        if not self._listen.startswith("unix:"):
            self.address = f"{self._listen.rpartition(':')[0]}:{port}"
        if exposure := self._door.exposure(self.address):
            logger.warning("%s", exposure)
        await self.set_ready(False)
        await self.set_alive(True)
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """Whether requests are answered now. Cheap when nothing changes; watchers are told of changes."""
        if ready != self._ready:
            self._ready = ready
            for name in ("", READINESS, *self._service_names):
                await self._set(name, ready)

    async def set_alive(self, alive: bool) -> None:
        """Whether the service makes progress; one that does not wants a restart."""
        if alive != self._alive:
            self._alive = alive
            await self._set(LIVENESS, alive)

    async def _set(self, name: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls; running ones may end within `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class StopSignal:
    """SIGTERM and SIGINT from here on. A second one ends the process at once, as without a handler."""

    def __init__(self) -> None:
        """Within the event loop, before anybody can know that the service is there."""
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        for number in _STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        self._came.set()
        for number in _STOP_SIGNALS:
            with contextlib.suppress(ValueError):
                self._loop.remove_signal_handler(number)

    async def wait(self) -> None:
        """Returns once one has come."""
        await self._came.wait()
