"""What the client library raises: a gRPC status and its google.rpc details, as one typed exception."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from svc_common.security.handshake import CLIENT, Greeting, handshake_trouble

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    field: str
    """Path in the request, e.g. "request.sampling.top_p"."""
    description: str


class NeoflexError(Exception):
    """A request failed. `code` is the gRPC status by name, `reason` the server's UPPER_SNAKE word for it."""

    def __init__(
        self,
        message: str,
        code: str,
        reason: str = "",
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s
        """How long to wait before another try; None where the server names no time."""

    def __str__(self) -> str:
        fields = "; ".join(f"{item.field}: {item.description}" for item in self.violations)
        # Where the message already names the fields, once is enough.
        detail = f" ({fields})" if fields and fields not in self.message else ""
        retry = "" if self.retry_after_s is None else f" (try again in {self.retry_after_s:g} s)"
        kind = self.code if self.reason in ("", self.code) else f"{self.code} {self.reason}"
        return f"{kind}: {self.message}{detail}{retry}"


class InvalidArgumentError(NeoflexError):
    """The request can't be served as it is; `violations` says why."""


class ResourceExhaustedError(NeoflexError):
    """The server has too much to do; try again after `retry_after_s`."""


class UnavailableError(NeoflexError):
    """The server can't be reached, is loading, is draining, or lost the request."""


class DeadlineExceededError(NeoflexError):
    """`timeout` was over before the answer was complete."""


class UnauthenticatedError(NeoflexError):
    """The server asks for an API key, and has not been given one of its own."""


class AccessError(NeoflexError):
    """The client's own certificate, CA or key can't be used; no server was asked."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "FAILED_PRECONDITION", "CLIENT_FILES")


_BY_CODE: dict[str, type[NeoflexError]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "RESOURCE_EXHAUSTED": ResourceExhaustedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "UNAUTHENTICATED": UnauthenticatedError,
}


class FailedCall(Protocol):
    """What the exceptions of grpc and of grpc.aio have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[Any] | None: ...


_PLAIN = Greeting(speaks_tls=False, has_certificate=False, settings=CLIENT)


def from_call(
    call: FailedCall, address: str, timeout_s: float | None = None, greeting: Greeting = _PLAIN
) -> NeoflexError:
    """The error to raise for a failed call to `address`, which had `timeout_s` seconds, by a caller that came with
    `greeting`."""
    code = call.code().name
    message = call.details() or code
    reason = ""
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s = None
    for detail in _details(call):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations = tuple(FieldViolation(item.field, item.description) for item in bad.field_violations)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    if not reason:  # The transport speaks, not the server: its words are long, and the address is what helps.
        message = _in_our_words(code, message, address, timeout_s, greeting)
    return _BY_CODE.get(code, NeoflexError)(message, code, reason, violations, retry_after_s)


def _in_our_words(code: str, message: str, address: str, timeout_s: float | None, greeting: Greeting) -> str:
    if code == "DEADLINE_EXCEEDED" and timeout_s is not None:
        return f"no complete answer from {address} within {timeout_s:g} s"
    if code == "UNAVAILABLE" and "Connection refused" in message:
        return f"nobody listens at {address}; start a server with: neoflex up"
    if code == "UNAVAILABLE":
        return handshake_trouble(message, address, greeting) or f"no answer from {address}: {message}"
    if code == "UNIMPLEMENTED":
        return f"what listens at {address} is another service, or another version: {message}"
    return message


def _details(call: FailedCall) -> list[any_pb2.Any]:
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return list(status_pb2.Status.FromString(value).details)
    return []


def not_ready(address: str, timeout_s: float, trouble: str) -> NeoflexError:
    """`trouble`: with TLS, when it was asked last; or nothing."""
    why = f": {trouble}" if trouble else ""
    return DeadlineExceededError(f"{address} was not ready within {timeout_s:g} s{why}", "DEADLINE_EXCEEDED")


def cut_short(address: str) -> NeoflexError:
    """A server that keeps to the protocol ends each stream with `finished`."""
    return NeoflexError(f"{address} ended the stream before the answer was complete", "DATA_LOSS")
