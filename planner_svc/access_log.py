"""One line for each request that ended or was refused: what it took, and whether it was in time. Never its text."""

import logging
import time

from planner_svc.generation import Finished, Generation
from svc_common.errors import ServiceError
from svc_common.logs import fields

logger = logging.getLogger(__name__)


class AccessLog:
    """`gateway_id`: how the gateway knows the request, where it comes from there."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    def ended(self, generation: Generation, gateway_id: str | None) -> None:
        """The call is over: the request finished, failed, or its caller has gone."""
        if not self._is_on:
            return
        request, outcome = generation.request, generation.outcome
        common = {
            "request_id": request.request_id,
            "gateway_id": gateway_id,
            "service_class": request.service_class.name,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": generation.num_tokens,
        }
        if isinstance(outcome, Finished):
            logger.info("request finished", extra=fields(**common, **_taken(outcome)))
            return
        duration_s = (time.monotonic_ns() - request.arrival_ns) / 1e9
        if outcome is None:
            logger.info("request cancelled", extra=fields(**common, duration_s=duration_s))
        else:
            failure = {"code": outcome.code.name, "reason": outcome.reason}
            logger.info("request failed", extra=fields(**common, **failure, duration_s=duration_s))

    def refused(self, request_id: str, gateway_id: str | None, error: ServiceError) -> None:
        """At the door; the id may be empty, where the caller gave none."""
        if self._is_on:
            failure = {"code": error.code.name, "reason": error.reason}
            logger.info(
                "request refused", extra=fields(request_id=request_id or None, gateway_id=gateway_id, **failure)
            )


def _taken(finished: Finished) -> dict[str, object]:
    first_s, duration_s = finished.time_to_first_token_ns / 1e9, finished.duration_ns / 1e9
    follow = finished.completion_tokens - 1
    return {
        "finish_reason": finished.reason.value,
        "cached_tokens": finished.cached_tokens,
        "recomputations": finished.recomputations,
        "ttft_s": first_s if finished.completion_tokens else None,
        "tpot_s": (duration_s - first_s) / follow if follow > 0 else None,
        "duration_s": duration_s,
        "slo_met": finished.targets_met,
    }
