"""What callers are told when their request is refused for want of room or time."""

from planner_svc.counters import bounded_retry_s
from planner_svc.scheduler import MAX_LOSSES, MAX_LOSSES_IN_A_ROW, AdmissionError, AdmissionReason, LateError, Verdict
from svc_common.errors import (
    ServiceError,
    failed_precondition,
    internal,
    invalid_argument,
    resource_exhausted,
    unavailable,
)


def queue_full(limit: int, retry_s: float) -> ServiceError:
    """`limit` requests wait; a place is likely to be free after `retry_s`."""
    return resource_exhausted(
        "QUEUE_FULL", f"{limit} requests are waiting already", "planner.max_waiting_requests", retry_s
    )


def too_long(field: str, num_tokens: int, limit: int) -> ServiceError:
    """A prompt that leaves no room for a token."""
    return invalid_argument(
        field, f"must be at most {limit - 1} tokens, is {num_tokens}: the context holds {limit}", "CONTEXT_EXCEEDED"
    )


def never_fits(error: AdmissionError, prompt_field: str) -> ServiceError:
    """`prompt_field` is what to name where the prompt is too long."""
    field = prompt_field if error.field == "prompt" else "request.stopping.max_tokens"
    what = "context" if error.reason is AdmissionReason.EXCEEDS_CONTEXT else "KV cache"
    text = f"prompt and answer must be at most {error.limit} tokens together: the {what} holds no more"
    return invalid_argument(field, text, error.reason.name)


def too_late(error: LateError, class_name: str, place_free_s: float) -> ServiceError:
    """The first token is in time again when the backlog is shorter by what it was late; the pace, when others end.

    `place_free_s`: until the next request ends, as far as can be told.
    """
    is_first = error.reason is AdmissionReason.TTFT_UNREACHABLE
    what = "its first token would come" if is_first else "its tokens would follow one another"
    retry_s = bounded_retry_s(error.predicted_s - error.target_s) if is_first else place_free_s
    text = f"{what} after {error.predicted_s:.3g} s, its target is {error.target_s:.3g} s"
    return resource_exhausted(error.reason.name, text, f"planner.classes.{class_name}.{error.field}_s", retry_s)


def not_computed_again(verdict: Verdict) -> ServiceError:
    """Of a request whose executor was lost or failed too often."""
    if verdict is Verdict.BREAKS_EXECUTOR:
        # Not UNAVAILABLE or INTERNAL: whoever tries those again would bring the executor down again.
        text = (
            f"the executor failed {MAX_LOSSES_IN_A_ROW} times in a row while it computed this request, the last time "
            "with no other in doubt: do not send it again before the server's log was looked at"
        )
        return failed_precondition("BREAKS_EXECUTOR", text)
    return unavailable("EXECUTOR_LOST", f"the executor failed {MAX_LOSSES} times while it computed this request")


def breaks_compiler(num_losses: int) -> ServiceError:
    """Of a grammar at whose compilation the executor was lost each time."""
    text = (
        f"the executor was lost {num_losses} times in a row while it made this constraint ready: do not send it again "
        "before the server's log was looked at"
    )
    return failed_precondition("BREAKS_EXECUTOR", text)


def not_finite() -> ServiceError:
    """Of a request whose logits are no numbers."""
    text = "the model computed NaN or infinity for this request; what was sent before stands"
    return internal("NON_FINITE_LOGITS", text)


def executor_lost(waited_s: float, retry_s: float) -> ServiceError:
    """Of a request that waited so long for the executor to come back."""
    text = "the executor was lost" + (f" and did not come back within {waited_s:g} s" if waited_s else "")
    return unavailable("EXECUTOR_LOST", text, retry_s)
