"""Failures on their way to a caller: ServiceError is raised anywhere and becomes a gRPC status in one place.

Each status carries google.rpc details: an ErrorInfo with an UPPER_SNAKE reason always, field violations, a quota
failure or a retry delay where they apply. `ErrorInterceptor`, part of every GrpcServer, is that one place.
"""

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "neoflex"

# gRPC drops a trailer of more than 8 KiB and reports an error of its own in its place. There, text is percent-encoded,
# up to three times as long, and stands a second time in the details, in base64.
_TEXT_BYTES = 1000
_DESCRIPTION_BYTES = 500
_VIOLATIONS_BYTES = 2000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request."""

    field: str
    """Path from the request message, e.g. "request.sampling.top_p"."""
    description: str
    """Names the limit, e.g. "must be in (0, 1], is 1.5"."""


class ServiceError(Exception):
    """A failure that a caller is told about. Make one with the functions below."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        text: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        quota_subject: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(text)
        self.code = code
        self.reason = reason
        """UPPER_SNAKE, for programs."""
        self.text = text
        """For people."""
        self.violations = violations
        self.quota_subject = quota_subject
        """What ran out, e.g. "planner.max_waiting_requests"; empty where nothing did."""
        self.retry_after_s = retry_after_s


def invalid_argument(field: str, description: str, reason: str = "INVALID_ARGUMENT") -> ServiceError:
    """A request that can never be served as it is, because of one field."""
    return invalid_arguments((FieldViolation(field, description),), reason)


def invalid_arguments(violations: tuple[FieldViolation, ...], reason: str = "INVALID_ARGUMENT") -> ServiceError:
    """A request that can never be served as it is."""
    text = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, reason, text, violations=violations)


def resource_exhausted(reason: str, text: str, subject: str, retry_after_s: float) -> ServiceError:
    """No room now; `subject` is the limit that was reached."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, reason, text, quota_subject=subject, retry_after_s=retry_after_s
    )


def unavailable(reason: str, text: str, retry_after_s: float | None = None) -> ServiceError:
    """Not served now, through no fault of the request."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, text, retry_after_s=retry_after_s)


def already_exists(reason: str, text: str) -> ServiceError:
    """What the request would create is there already."""
    return ServiceError(grpc.StatusCode.ALREADY_EXISTS, reason, text)


def unauthenticated(reason: str, text: str) -> ServiceError:
    """Who calls has not shown that he may."""
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, reason, text)


def failed_precondition(reason: str, text: str) -> ServiceError:
    """The service is not in a state in which this call makes sense."""
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, reason, text)


def internal(reason: str, text: str) -> ServiceError:
    """The service failed at a request, through no fault of the caller that is known."""
    return ServiceError(grpc.StatusCode.INTERNAL, reason, text)


def _unexpected() -> ServiceError:
    """Says nothing of what happened: that is in the log."""
    return internal("INTERNAL", "internal error; the service's log has the details")


def to_status(error: ServiceError) -> status_pb2.Status:
    """The failure as google.rpc.Status, details included; what is too long for a trailer is shortened."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    text = _shortened(error.text, _TEXT_BYTES)
    if error.violations:
        details.append(error_details_pb2.BadRequest(field_violations=_violation_messages(error.violations)))
    if error.quota_subject:
        violation = error_details_pb2.QuotaFailure.Violation(subject=error.quota_subject, description=text)
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code.value[0], message=text)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _violation_messages(
    violations: Iterable[FieldViolation],
) -> list[error_details_pb2.BadRequest.FieldViolation]:
    """The first ones, as far as there is room."""
    messages: list[error_details_pb2.BadRequest.FieldViolation] = []
    num_bytes = 0
    for violation in violations:
        description = _shortened(violation.description, _DESCRIPTION_BYTES)
        message = error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=description)
        num_bytes += message.ByteSize()
        if num_bytes > _VIOLATIONS_BYTES:
            break
        messages.append(message)
    return messages


def _shortened(text: str, num_bytes: int) -> str:
    """At most so many bytes in UTF-8."""
    encoded = text.encode()
    return text if len(encoded) <= num_bytes else encoded[: num_bytes - 3].decode(errors="ignore") + "…"


class _Malformed:
    """Stands for a request whose bytes are no message of the expected type."""


_MALFORMED = _Malformed()


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the type stubs only
    """Turns whatever a handler raises into a status; anything but ServiceError is logged and becomes INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        make, behaviour = _form(handler)
        wrapped = _wrap(behaviour, method)
        return make(wrapped, _lenient(handler.request_deserializer), handler.response_serializer)


def _form(handler: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How to make a handler of the same form, and the function behind it."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """grpc.aio answers UNKNOWN to bytes it cannot read; the caller is to get INVALID_ARGUMENT."""

    def deserialize_or_mark(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:
            return _MALFORMED

    return deserialize_or_mark


def _wrap(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Handlers that yield stay generators; those that are awaited stay coroutines."""
    if inspect.isasyncgenfunction(behaviour):

        @functools.wraps(behaviour)
        async def generate(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async for response in behaviour(_checked(request), context):
                    yield response
            except Exception as error:
                await _abort(error, context, method)

        return generate

    @functools.wraps(behaviour)
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except Exception as error:
            await _abort(error, context, method)

    return call


def _checked(request: Any) -> Any:
    """The request itself. Raises ServiceError where its bytes were no message."""
    if request is _MALFORMED:
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", "the request is not a message of the expected type"
        )
    if hasattr(request, "__aiter__"):
        return _checked_stream(request)
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


async def _abort(error: Exception, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, ServiceError):
        logger.error("%s failed", method, exc_info=error)
        error = _unexpected()
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
