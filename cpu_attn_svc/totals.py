"""What one service's regions did in all, while others come and go."""

import time


class Totals:
    """Since the service started. Written by the thread of the region that is open, read by others."""

    def __init__(self) -> None:
        self.iterations = 0
        """With work for this service."""
        self.busy_ns = 0
        self.wait_ns = 0
        """Within iterations, for the executor."""
        self._closed_ns = 0
        self._opened_ns = 0

    def begin(self) -> None:
        """A region is open."""
        self._opened_ns = time.monotonic_ns()

    def end(self) -> None:
        """It is not any more."""
        self._closed_ns += time.monotonic_ns() - self._opened_ns
        self._opened_ns = 0

    def add(self, busy_ns: int, wait_ns: int) -> None:
        """An iteration was computed."""
        self.iterations += 1
        self.busy_ns += busy_ns
        self.wait_ns += wait_ns

    @property
    def idle_ns(self) -> int:
        """While a region was open, between iterations."""
        opened_ns = self._opened_ns
        open_ns = self._closed_ns + (time.monotonic_ns() - opened_ns if opened_ns else 0)
        return max(0, open_ns - self.busy_ns - self.wait_ns)
