"""When a refused call is tried again: after the time that the server names, and only where it names one."""

import time

from neoflex.errors import NeoflexError, ResourceExhaustedError, UnavailableError

DEFAULT_RETRIES = 2
_LONGEST_DELAY_S = 60.0
"""Who is to wait longer should know."""


class Deadline:
    """Of a call with all its tries."""

    def __init__(self, timeout_s: float | None) -> None:
        """None: without a limit."""
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def retry_delay_s(self, error: NeoflexError, num_left: int) -> float:
        """Seconds until the next of `num_left` tries. Raises `error` where there is to be none.

        A delay beyond the deadline would only turn a clear answer into a timeout.
        """
        delay_s, left_s = error.retry_after_s, self.left_s
        passes = isinstance(error, ResourceExhaustedError | UnavailableError)
        if num_left < 1 or not passes or delay_s is None or delay_s > _LONGEST_DELAY_S:
            raise error
        if left_s is not None and delay_s >= left_s:
            raise error
        return delay_s
