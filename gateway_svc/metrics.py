"""HTTP requests as this process sees them. What they generate is the planner's to count."""

from dataclasses import dataclass

from svc_common.telemetry import instruments
from svc_common.telemetry.meters import Meters, value

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})


@dataclass(slots=True)
class Outcome:
    """How a request came out; filled by those who learn it."""

    status: int = 0
    error: str = ""
    """OpenAI's code of a failure, or "client_disconnected"."""

    def client_gone(self) -> None:
        """The caller hung up before the end. Counted as nginx does; nobody receives that status."""
        self.status, self.error = 499, "client_disconnected"


class Metrics:
    def __init__(self, meters: Meters) -> None:
        self.num_active = 0
        """HTTP requests that run now."""
        self._duration = meters.histogram(instruments.HTTP_DURATION)
        meters.observe(instruments.HTTP_ACTIVE, value(lambda: self.num_active))

    def ended(self, route: str, method: str, outcome: Outcome, duration_s: float) -> None:
        """`method` is what the caller wrote."""
        known = method if method in _METHODS else "_OTHER"
        self._duration.of(known, route, str(outcome.status), outcome.error).observe(duration_s)
