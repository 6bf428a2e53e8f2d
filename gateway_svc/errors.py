"""Failures as HTTP callers are told them, in OpenAI's shape; the planner's own are translated here."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from neoflex.errors import NeoflexError

INVALID = "invalid_request_error"
_DEFAULT_RETRY_S = 1.0

# By gRPC status: HTTP status, and OpenAI's word for the kind of failure.
_STATUSES = {
    "INVALID_ARGUMENT": (400, INVALID),
    "FAILED_PRECONDITION": (400, INVALID),
    "NOT_FOUND": (404, INVALID),
    "ALREADY_EXISTS": (409, INVALID),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "UNIMPLEMENTED": (501, "server_error"),
    "UNAVAILABLE": (503, "service_unavailable_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
_CODES = {
    "INVALID_ARGUMENT": "invalid_value",
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "EXCEEDS_CONTEXT": "context_length_exceeded",
}
# Where a field of inference.proto has another name in JSON. The longest that a path begins with counts.
_NAMES = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "",
    "sampling": "",
    "stopping": "",
    "output": "",
    "targets.ttft": "x-slo-ttft-ms",
    "targets.tpot": "x-slo-tpot-ms",
}


class ApiError(Exception):
    """A request that fails. `param` is the JSON field, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def invalid(param: str, description: str, code: str = "invalid_value") -> ApiError:
    """A request that can never be served as it is, because of one field."""
    return ApiError(400, f"{param}: {description}", code=code, param=param)


@contextmanager
def planner_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Turns the planner's refusals into ApiErrors. `names`: as `_NAMES`, for one kind of request; they win."""
    try:
        yield
    except NeoflexError as error:
        raise translated(error, names) from error


def translated(error: NeoflexError, names: Mapping[str, str]) -> ApiError:
    if error.code == "UNAUTHENTICATED":  # Not the caller's fault.
        text = "the planner does not let the gateway in; its operator has to set gateway.planner_key_file"
        return ApiError(502, text, kind="server_error", code="planner_refuses_gateway")
    status, kind = _STATUSES.get(error.code, (500, "server_error"))
    code = _CODES.get(error.reason, error.reason.lower()) or error.code.lower()
    retry_after_s = error.retry_after_s
    if status in (429, 503) and retry_after_s is None:
        retry_after_s = _DEFAULT_RETRY_S
    if not error.violations:
        return ApiError(status, error.message, kind=kind, code=code, retry_after_s=retry_after_s)
    fields = [(_json_name(item.field, names), item.description) for item in error.violations]
    message = "; ".join(f"{field}: {description}" for field, description in fields)
    return ApiError(status, message, kind=kind, code=code, param=fields[0][0], retry_after_s=retry_after_s)


def _json_name(path: str, names: Mapping[str, str]) -> str:
    """ "request.stopping.stop[2]" is "stop[2]"."""
    path = path.removeprefix("request.")
    known = {**_NAMES, **names}
    for prefix in sorted(known, key=len, reverse=True):
        rest = path.removeprefix(prefix)
        if path.startswith(prefix) and (not rest or rest[0] in ".["):
            if known[prefix]:
                return known[prefix]
            return re.sub(r"^\.", "", rest) or path
    return path
