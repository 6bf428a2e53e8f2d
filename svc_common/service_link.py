"""How a service calls another: a channel, by TLS where the address has a port and there is [tls]."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from svc_common.security.tls import TlsFiles, speaks_tls

_Stub = TypeVar("_Stub")


def open_channel(address: str, tls: TlsFiles | None, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    """Shows the service's certificate as it is now. Raises ConfigError where that is of no use for calls."""
    if tls is None or not speaks_tls(address):
        return grpc.aio.insecure_channel(address, options=options)
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*options, *name])


class ServiceLink(Generic[_Stub]):
    """Calls to one service, used within one event loop. Raises ConfigError as `open_channel`.

    A connection lives as long as both services do, whatever becomes of the certificate that it began with; a next one
    is made with the files as they are then.
    """

    def __init__(
        self,
        address: str,
        make_stub: Callable[[grpc.aio.Channel], _Stub],
        tls: TlsFiles | None,
        options: Sequence[tuple[str, Any]],
    ) -> None:
        self.address = address
        self._make_stub = make_stub
        self._tls = tls if speaks_tls(address) else None
        self._options = options
        self._shown = self._tls and self._tls.identity()
        self._channel = open_channel(address, tls, options)
        self._stub = make_stub(self._channel)
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def stub(self) -> _Stub:
        """To be taken anew for each call."""
        if self._tls is not None and self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._renew(self._tls)
        return self._stub

    def _renew(self, tls: TlsFiles) -> None:
        """No call is lost: there is no connection."""
        identity = tls.identity()
        if identity is self._shown:
            return
        old, self._channel = self._channel, open_channel(self.address, tls, self._options)
        self._shown = identity
        self._stub = self._make_stub(self._channel)
        task = asyncio.get_running_loop().create_task(old.close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        await self._channel.close(None)
