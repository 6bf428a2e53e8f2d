"""Whether the engine has an executor and takes requests, and what callers are told while it does not."""

import time

from svc_common.errors import ServiceError, unavailable

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 30.0


class Availability:
    """The engine's state as the outside sees it. Closed at first."""

    def __init__(self) -> None:
        self.is_open = False
        """There is an executor."""
        self.is_suspended = False
        """One epoch is over and the next is being opened: requests wait, and waiting is no stall."""
        self.is_draining = False
        self._was_open = False
        self._trouble = ""
        self._closed_since_s = time.monotonic()
        self._last_closed_s = 0.0
        """How long it was closed the last time."""

    def open(self) -> None:
        if not self.is_open:
            self._last_closed_s = time.monotonic() - self._closed_since_s
        self.is_open = self._was_open = True
        self.is_suspended = False
        self._trouble = ""

    def close(self) -> None:
        """Until `open`."""
        if self.is_open:
            self._closed_since_s = time.monotonic()
        self.is_open = False

    def explain(self, trouble: str) -> bool:
        """Why the executor can't serve, for who asks until `open`; empty where it merely isn't there.

        Returns whether it is news.
        """
        is_news = trouble != self._trouble
        self._trouble = trouble
        return is_news

    def check(self) -> None:
        """Raises ServiceError where no request is taken."""
        if self.is_draining:
            raise unavailable("DRAINING", "the server is shutting down", _MIN_RETRY_S)
        if not self.is_open:
            raise self.closed()

    def closed(self) -> ServiceError:
        """What those are told that need an executor; to come back after about as long as it took the last time."""
        left_s = self._closed_since_s + self._last_closed_s - time.monotonic()
        reason = "EXECUTOR_LOST" if self._was_open else "LOADING"
        return unavailable(reason, self.what_is_awaited, min(max(left_s, _MIN_RETRY_S), _MAX_RETRY_S))

    @property
    def what_is_awaited(self) -> str:
        """While it is closed."""
        what = "the executor was lost and is awaited" if self._was_open else "the model is being loaded"
        return f"{what}: {self._trouble}" if self._trouble else what
