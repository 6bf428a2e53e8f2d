"""Hands traces of iterations from the executor loop to those who ask for them. While nobody does, none are made."""

import asyncio
from collections.abc import AsyncGenerator

from svc_common.trace import IterationTrace

_MAX_WAITING = 256
"""Traces of some 10 kB; who takes them more slowly misses some."""


class Traces:
    """Used on the event loop's thread."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[IterationTrace]] = set()

    @property
    def are_wanted(self) -> bool:
        return bool(self._listeners)

    def publish(self, trace: IterationTrace) -> None:
        for queue in self._listeners:
            if not queue.full():
                queue.put_nowait(trace)

    async def listen(self) -> AsyncGenerator[IterationTrace, None]:
        """Each iteration planned from now on. Never ends; to be closed."""
        queue: asyncio.Queue[IterationTrace] = asyncio.Queue(_MAX_WAITING)
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)
