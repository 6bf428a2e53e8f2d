"""One line for each HTTP request: what was asked of which route, and how it came out. Never a body."""

import logging

from gateway_svc.metrics import Outcome
from svc_common.logs import fields

_QUIET = ("/health", "/health/ready", "/health/live", "/metrics", "/console/")

logger = logging.getLogger(__name__)


class AccessLog:
    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    def ended(self, route: str, method: str, outcome: Outcome, duration_s: float) -> None:
        """Those of machines that look in every few seconds are left out."""
        if not self._is_on or route.startswith(_QUIET):
            return
        values = {"method": method, "route": route, "status": outcome.status, "duration_s": duration_s}
        logger.info(
            "HTTP request ended",
            extra=fields(**values, operation=outcome.operation or None, error=outcome.error or None),
        )
