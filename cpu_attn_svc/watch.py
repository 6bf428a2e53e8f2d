"""The service as its watchdog and its health see it: a layer that is computed for too long makes no progress.

Waiting for the executor is no stall, however long: that is the executor's.
"""

import asyncio

from cpu_attn_svc.host import AttentionHost
from cpu_attn_svc.servicer import CpuAttentionServicer
from svc_common.grpc_server import GrpcServer

_HEALTH_EVERY_S = 0.5


class HostWatch:
    """See svc_common.watchdog.Watched."""

    def __init__(self, server: GrpcServer, host: AttentionHost, servicer: CpuAttentionServicer, stall_s: float) -> None:
        self._server = server
        self._host = host
        self._servicer = servicer
        self._stall_s = stall_s

    def stall(self) -> str | None:
        computing_s = self._host.computing_s
        return f"a layer is being computed for {computing_s:.1f} s" if computing_s > self._stall_s else None

    def report(self) -> str:
        host, status = self._host, self._host.status()
        return (
            f"{status}; in use {host.is_in_use}, stopping {self._servicer.is_stopping}\n"
            f"{host.num_threads} threads of at most {host.max_threads}; in a layer for {host.computing_s:.3f} s"
        )

    async def ask(self) -> str:
        return ""  # It calls nobody.

    async def publish_health(self) -> None:
        """Never returns; to be cancelled."""
        while True:
            await self.publish_now()
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def publish_now(self) -> None:
        alive = self.stall() is None
        await self._server.set_alive(alive)
        await self._server.set_ready(alive and not self._servicer.is_stopping)
