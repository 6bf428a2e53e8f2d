"""One CPU attention service as ExecutorLoop looks after it: whether it answers, when to attach it, its threads."""

import asyncio
import itertools
import logging
import time

from planner_svc.core_keeper import CoreKeeper
from planner_svc.executor_client import HostClient, HostStatus

PROBE_EVERY_S = 1.0
_RETRY_S = 1.0
_MAX_ATTACH_DELAY_S = 60.0
_RECONNECT_S = 2.0
"""After which the planner's own connection has found a service that restarted."""

logger = logging.getLogger(__name__)


class HostWatch:
    """Knows nothing of the other services, or of epochs."""

    def __init__(self, host: HostClient, cores: CoreKeeper) -> None:
        self.cores = cores
        self._host = host
        self._attach_delay_s = PROBE_EVERY_S
        self._next_attach_s = 0.0
        self._answers = False
        """When it was asked last."""
        self._silent_until_s = 0.0
        """Until then it may have been attached and yet not be found here."""
        self._was_stopping = False
        """When it was asked last but one."""

    async def status(self) -> HostStatus | None:
        """What it says of itself; None where nobody answers.

        Raises TimeoutError where it may only be slow, or where it came back and the connection has not.
        """
        status = await self._ask()
        if status is None and time.monotonic() < self._silent_until_s:
            raise TimeoutError
        return status

    async def _ask(self) -> HostStatus | None:
        status = await self._host.status()
        self._answers = status is not None
        return status

    async def is_lost(self) -> bool:
        """Whether it does not answer, now that work on its pool has failed."""
        try:
            return await self._ask() is None
        except TimeoutError:
            return True

    async def until_it_answers(self) -> None:
        """However long that takes."""
        for attempt in itertools.count():
            if not await self.is_lost():
                return
            if attempt % 10 == 9:
                logger.info("waiting for the CPU attention service at %s", self._host.address)
            await asyncio.sleep(_RETRY_S)

    def must_be_let_go(self, status: HostStatus) -> bool:
        """Whether it has been told to stop for a second: had the planner been told as well, it would know by now."""
        was_stopping, self._was_stopping = self._was_stopping, status.is_stopping
        return was_stopping and status.is_stopping

    async def describe(self) -> str:
        """What the service says of itself, in one line."""
        return f"{self._host.address}: {await self._host.describe()}"

    async def adjust_threads(self) -> None:
        """Where that is due."""
        await self.cores.adjust(self._host)

    def note_attachment(self, is_attached: bool) -> None:
        """Each failure to attach a service that answers doubles the time to the next try: a try stops all work."""
        if is_attached:
            self._attach_delay_s = PROBE_EVERY_S
            self._silent_until_s = 0.0 if self._answers else time.monotonic() + _RECONNECT_S
        else:
            self._next_attach_s = time.monotonic() + self._attach_delay_s
            self._attach_delay_s = min(2 * self._attach_delay_s, _MAX_ATTACH_DELAY_S)

    @property
    def may_be_attached(self) -> bool:
        """Whether it is time for another try, if it answers."""
        return time.monotonic() >= self._next_attach_s
