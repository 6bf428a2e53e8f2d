"""Keys from a file, and the door that asks for one."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from svc_common.config import ConfigError
from svc_common.grpc_server import CHANNEL_OPTIONS, GrpcServer
from svc_common.security.api_keys import ApiKeys, first_key
from svc_common.security.door import Door


def test_keys_are_read_again_when_the_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("old")
    keys = ApiKeys("planner.api_keys_file", path)
    replacement = tmp_path / "new"
    replacement.write_text("new")
    os.replace(replacement, path)
    assert keys.allows("Bearer new")
    assert not keys.allows("Bearer old")
    path.unlink()
    assert keys.allows("bearer new")
    assert keys.allows("Bearer new")
    assert caplog.text.count("stay valid") == 1
    path.write_text("# none\n")
    assert not keys.allows("Bearer new")
    assert not keys.allows("Bearer ")


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys("planner.api_keys_file", tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing")
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys("planner.api_keys_file", tmp_path / "empty")


def test_the_first_key_is_one_to_call_with(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  first \nsecond\n")
    assert first_key("gateway.planner_key_file", path) == "first"
    path.write_text("schlüssel")
    with pytest.raises(ConfigError, match=r"gateway.planner_key_file: .*printable ASCII"):
        first_key("gateway.planner_key_file", path)


def test_a_file_that_everybody_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("key")
    path.chmod(0o640)
    ApiKeys("planner.api_keys_file", path)
    assert caplog.text == ""
    path.chmod(0o644)
    ApiKeys("planner.api_keys_file", path)
    assert f"planner.api_keys_file: {path} may be read by everybody" in caplog.text


class Service(grpc.GenericRpcHandler):
    """Returns its bytes, as one message or as a stream."""

    def __init__(self) -> None:
        self.num_calls = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def one(request: bytes, context: object) -> bytes:
            self.num_calls += 1
            return request

        async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
            self.num_calls += 1
            yield request

        if details.method.endswith("/Stream"):
            return grpc.unary_stream_rpc_method_handler(stream, bytes, bytes)
        return grpc.unary_unary_rpc_method_handler(one, bytes, bytes)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def channel(tmp_path: Path, service: Service) -> AsyncIterator[grpc.aio.Channel]:
    path = tmp_path / "keys"
    path.write_text("right\nalso-right\n")
    door = Door(keys=ApiKeys("planner.api_keys_file", path))
    server = GrpcServer("127.0.0.1:0", ["test.v1.Service"], door)
    server.register(lambda handler, target: target.add_generic_rpc_handlers([handler]), service)
    await server.start()
    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        yield channel
    await server.stop(0)


METADATA = [
    (),
    (("authorization", "Bearer wrong"),),
    (("authorization", "Bearer "),),
    (("authorization", "Basic right"),),
    (("authorization", "right"),),
    (("x-api-key", "right"),),
    (("authorization-bin", b"Bearer right"),),
]


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("size", [0, 2**25])
async def test_who_has_no_key_gets_nowhere(
    size: int, metadata: tuple[tuple[str, str | bytes], ...], channel: grpc.aio.Channel, service: Service
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/test.v1.Service/One")(b"x" * size, metadata=metadata)
    _check_refusal(caught.value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_stream("/test.v1.Service/Stream")(b"x" * size, metadata=metadata).read()
    _check_refusal(caught.value)
    assert service.num_calls == 0


def _check_refusal(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("API_KEY_INVALID", "neoflex")


@pytest.mark.parametrize("key", ["right", "also-right"])
async def test_who_has_one_is_served(key: str, channel: grpc.aio.Channel) -> None:
    metadata = (("authorization", f"Bearer {key}"),)
    assert await channel.unary_unary("/test.v1.Service/One")(b"hello", metadata=metadata) == b"hello"
    assert await channel.unary_stream("/test.v1.Service/Stream")(b"hello", metadata=metadata).read() == b"hello"


async def test_health_is_told_to_everybody_and_reflection_is_not(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest(service="liveness"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflection.ServerReflectionInfo(iter([request])).read()
    _check_refusal(caught.value)


def test_a_file_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^planner\.api_keys_file: /dev/zero: is larger than 4 MiB$"):
        ApiKeys("planner.api_keys_file", Path("/dev/zero"))
