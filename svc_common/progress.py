"""Says in the log how far something long has got, at most every few seconds."""

import logging
import time
from collections.abc import Callable

EVERY_S = 2.0


class Progress:
    """What ends within EVERY_S is not mentioned."""

    def __init__(
        self, logger: logging.Logger, doing: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`doing`: what stands before the share, e.g. "packing weights". `total` is at least 1, of any unit."""
        self._logger = logger
        self._doing = doing
        self._total = total
        self._clock = clock
        self._next_s = clock() + EVERY_S

    def reached(self, done: int) -> None:
        """So much of the total is done."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self._logger.info("%s: %.0f %%", self._doing, 100 * done / self._total)
