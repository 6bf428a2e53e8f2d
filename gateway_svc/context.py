"""What an HTTP request says in its headers."""

import re
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from starlette.datastructures import Headers

from gateway_svc.errors import invalid
from gateway_svc.planner import Metadata
from neoflex.v1 import inference_pb2 as pb

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_TARGET_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class RequestContext:
    metadata: Metadata
    """For the calls to the planner."""
    targets: pb.Targets | None
    service_class: str
    """Empty where the headers name none."""


def request_id(headers: Headers) -> str | None:
    """The caller's own, where it is printable and of at most 128 characters."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else None


def read_headers(headers: Headers, own_id: str, trace: Metadata) -> RequestContext:
    """`own_id`: how this request is known in logs. `trace`: its context, for the planner. Raises ApiError."""
    targets = pb.Targets(ttft=_target(headers, "ttft"), tpot=_target(headers, "tpot"))
    return RequestContext(
        metadata=(("x-request-id", own_id), *trace),
        targets=targets if targets.ByteSize() else None,
        service_class=headers.get("x-service-class", ""),
    )


def _target(headers: Headers, kind: str) -> Duration | None:
    for name in (f"x-slo-{kind}-ms", f"x-llm-d-slo-{kind}-ms"):
        if (text := headers.get(name)) is None:
            continue
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = -1
        if not 0 < milliseconds <= _MAX_TARGET_MS:
            raise invalid(name, f"must be milliseconds, greater than 0 and at most {_MAX_TARGET_MS}, is {text!r:.100}")
        duration = Duration()
        duration.FromNanoseconds(round(milliseconds * 1e6))
        return duration
    return None
