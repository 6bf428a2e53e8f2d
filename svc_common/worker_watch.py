"""A worker, gpu_svc or cpu_attn_svc, as its watchdog and its health see it: alive while what it computes ends."""

import asyncio
from abc import ABC, abstractmethod

from svc_common.grpc_server import GrpcServer

_HEALTH_EVERY_S = 0.5


class WorkerWatch(ABC):
    """See svc_common.watchdog.Watched."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server

    @abstractmethod
    def stall(self) -> str | None: ...

    @abstractmethod
    def report(self) -> str: ...

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether somebody may come who has work for it."""

    async def ask(self) -> str:
        return ""  # The planner asks all; a worker asks nobody.

    async def publish_health(self) -> None:
        """Never returns; to be cancelled."""
        while True:
            await self.publish_now()
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def publish_now(self) -> None:
        alive = self.stall() is None
        await self._server.set_alive(alive)
        await self._server.set_ready(alive and self.is_ready)
