"""The executor as its watchdog and its health see it: an iteration that runs for too long makes no progress."""

import asyncio

from gpu_svc.servicer import ExecutorServicer
from svc_common.grpc_server import GrpcServer

_HEALTH_EVERY_S = 0.5


class ExecutorWatch:
    """See svc_common.watchdog.Watched."""

    def __init__(self, server: GrpcServer, servicer: ExecutorServicer, stall_s: float) -> None:
        self._server = server
        self._servicer = servicer
        self._stall_s = stall_s

    def stall(self) -> str | None:
        return self._servicer.stall(self._stall_s)

    def report(self) -> str:
        return self._servicer.report()

    async def ask(self) -> str:
        return ""  # The planner asks all.

    async def publish_health(self) -> None:
        """Never returns; to be cancelled."""
        while True:
            await self.publish_now()
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def publish_now(self) -> None:
        """Ready once the model is loaded and until it is to stop; alive while iterations end."""
        alive = self.stall() is None
        await self._server.set_alive(alive)
        await self._server.set_ready(alive and self._servicer.is_ready)
