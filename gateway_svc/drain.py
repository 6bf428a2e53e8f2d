"""What the gateway has in hand, and that it takes nothing more once it is told to stop."""

import asyncio


class Drain:
    """Shared by the door, which counts and refuses, and the server, which waits."""

    def __init__(self) -> None:
        self.has_begun = False
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Requests from here on are refused."""
        self.has_begun = True

    def enter(self) -> None:
        """A request is taken up."""
        self.num_running += 1
        self._idle.clear()

    def leave(self) -> None:
        """Its answer is out, or its caller has gone."""
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()

    async def idle(self) -> None:
        """Returns once nothing is in hand."""
        await self._idle.wait()
