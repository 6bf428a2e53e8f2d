"""Every failure reaches a caller as a status with google.rpc details, whatever the form of the call."""

import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from svc_common import errors
from svc_common.grpc_server import GrpcServer

SERVICE = "test.Echo"


def details_of(call: grpc.aio.AioRpcError) -> dict[str, object]:
    """Details by type name."""
    status = rpc_status.from_call(call)
    assert status is not None
    found: dict[str, object] = {}
    for packed in status.details:
        assert isinstance(packed, any_pb2.Any)
        for kind in ("ErrorInfo", "BadRequest", "QuotaFailure", "RetryInfo"):
            message = getattr(error_details_pb2, kind)()
            if packed.Unpack(message):
                found[kind] = message
    return found


class Handlers(grpc.GenericRpcHandler):
    """A service whose four methods raise `failure`, the streaming ones after one response."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        make = {
            "uu": (grpc.unary_unary_rpc_method_handler, self.unary),
            "us": (grpc.unary_stream_rpc_method_handler, self.stream),
            "su": (grpc.stream_unary_rpc_method_handler, self.unary),
            "ss": (grpc.stream_stream_rpc_method_handler, self.stream),
        }.get(details.method.rpartition("/")[2])
        if make is None:
            return None
        request = health_pb2.HealthCheckRequest
        return make[0](
            make[1],
            request_deserializer=request.FromString,
            response_serializer=request.SerializeToString,
        )

    async def unary(self, request: object, context: object) -> health_pb2.HealthCheckRequest:
        if hasattr(request, "__aiter__"):
            request = [item async for item in request][-1]
        if self.failure:
            raise self.failure
        assert isinstance(request, health_pb2.HealthCheckRequest)
        return request

    async def stream(self, request: object, context: object) -> AsyncIterator[health_pb2.HealthCheckRequest]:
        if hasattr(request, "__aiter__"):
            request = [item async for item in request][-1]
        assert isinstance(request, health_pb2.HealthCheckRequest)
        yield request
        if self.failure:
            raise self.failure


async def receive(channel: grpc.aio.Channel, form: str, data: bytes, got: list[bytes]) -> None:
    """Makes one call of the given form; appends each response to `got` as it comes."""
    path = f"/{SERVICE}/{form}"
    if form == "us":
        responses = channel.unary_stream(path)(data)
    elif form == "ss":
        responses = channel.stream_stream(path)(iter([data]))
    else:
        got.append(
            await (channel.stream_unary(path)(iter([data])) if form == "su" else channel.unary_unary(path)(data))
        )
        return
    async for response in responses:
        got.append(response)  # noqa: PERF401 - what came before a failure counts


async def call(form: str, failure: Exception | None, data: bytes = b"") -> tuple[list[bytes], grpc.aio.AioRpcError]:
    """Responses before the failure, and the failure as the client sees it."""
    server = GrpcServer("127.0.0.1:0", [])
    server._server.add_generic_rpc_handlers([Handlers(failure)])
    await server.start()
    got: list[bytes] = []
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await receive(channel, form, data, got)
            return got, raised.value
    finally:
        await server.stop(0)


@pytest.mark.parametrize("form", ["uu", "us", "su", "ss"])
async def test_service_error_becomes_a_status_with_details(form: str) -> None:
    _, error = await call(form, errors.invalid_argument("request.sampling.top_p", "must be in (0, 1], is 1.5"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "request.sampling.top_p: must be in (0, 1], is 1.5"
    details = details_of(error)
    info = details["ErrorInfo"]
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "neoflex")
    [violation] = details["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("request.sampling.top_p", "must be in (0, 1], is 1.5")


async def test_responses_before_the_failure_arrive() -> None:
    got, error = await call("ss", errors.unavailable("DRAINING", "going away"), b"")
    assert got == [b""]
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "RetryInfo" not in details_of(error)


async def test_exhaustion_names_the_quota_and_the_delay() -> None:
    _, error = await call("uu", errors.resource_exhausted("QUEUE_FULL", "4 wait", "planner.max_waiting_requests", 1.25))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = details_of(error)
    [violation] = details["QuotaFailure"].violations
    assert (violation.subject, violation.description) == ("planner.max_waiting_requests", "4 wait")
    assert details["RetryInfo"].retry_delay.ToNanoseconds() == 1_250_000_000


@pytest.mark.parametrize("character", ["x", "本", "🙂"])
async def test_what_is_too_long_for_a_trailer_is_shortened(character: str) -> None:
    """gRPC would say RESOURCE_EXHAUSTED for the answer's metadata instead."""
    long = 20_000 * character
    violations = tuple(errors.FieldViolation(f"field[{index}]", long) for index in range(50))
    for _ in range(10):  # Between two limits it does so at random.
        _, error = await call("uu", errors.invalid_arguments(violations))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith(f"field[0]: {300 // len(character.encode()) * character}")
    found = details_of(error)["BadRequest"].field_violations
    assert [violation.field for violation in found] == ["field[0]", "field[1]", "field[2]"]
    assert {violation.description[-1] for violation in found} == {"…"}
    for failure in (
        errors.resource_exhausted("FULL", long, "planner.max_waiting_requests", 1.0),
        errors.unavailable("LOST", long),
    ):
        _, error = await call("ss", failure)
        assert error.code() is failure.code
        assert (error.details() or "").endswith(f"{character}…")


@pytest.mark.parametrize(
    ("failure", "code", "reason"),
    [
        (errors.already_exists("DUPLICATE", "x"), grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE"),
        (errors.failed_precondition("NO_REGION", "x"), grpc.StatusCode.FAILED_PRECONDITION, "NO_REGION"),
        (errors.unavailable("LOADING", "x", 2.0), grpc.StatusCode.UNAVAILABLE, "LOADING"),
    ],
)
async def test_codes_and_reasons(failure: errors.ServiceError, code: grpc.StatusCode, reason: str) -> None:
    _, error = await call("uu", failure)
    assert error.code() is code
    assert details_of(error)["ErrorInfo"].reason == reason


@pytest.mark.parametrize("form", ["uu", "us", "su", "ss"])
async def test_the_unexpected_is_logged_and_kept_from_the_caller(form: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "svc_common.errors"):
        _, error = await call(form, ZeroDivisionError("secret"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert details_of(error)["ErrorInfo"].reason == "INTERNAL"
    [record] = caplog.records
    assert record.exc_info is not None
    assert f"{SERVICE}/{form}" in record.getMessage()


@pytest.mark.parametrize("form", ["uu", "us", "su", "ss"])
async def test_bytes_that_are_no_message_are_the_callers_fault(form: str) -> None:
    _, error = await call(form, None, b"\x0a\x05ab")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)["ErrorInfo"].reason == "MALFORMED_MESSAGE"


async def test_an_unknown_method_is_unimplemented() -> None:
    _, error = await call("nope", None)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
