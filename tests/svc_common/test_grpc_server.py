"""What every service offers: health by name, reflection, large messages, quiet streams, a clean stop."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from svc_common.grpc_server import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, GrpcServer, ListenError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Echo(grpc.GenericRpcHandler):
    """Returns its bytes, at once or, by `/Wait`, when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def echo(request: bytes, context: object) -> bytes:
            if details.method.endswith("/Wait"):
                await self.release.wait()
            return request

        return grpc.unary_unary_rpc_method_handler(echo, lambda data: data, lambda data: data)


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1:0", ["test.v1.Service"])
    server.register(lambda handler, target: target.add_generic_rpc_handlers([handler]), Echo())
    await server.start()
    yield server
    await server.stop(0)


async def health_of(server: GrpcServer, name: str) -> int:
    async with grpc.aio.insecure_channel(server.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
        return int(answer.status)


async def test_health_by_name(server: GrpcServer) -> None:
    ready_names = ("", "readiness", "test.v1.Service")
    assert [await health_of(server, name) for name in ready_names] == [NOT_SERVING] * 3
    assert await health_of(server, "liveness") == SERVING
    await server.set_ready(True)
    await server.set_alive(False)
    assert [await health_of(server, name) for name in ready_names] == [SERVING] * 3
    assert await health_of(server, "liveness") == NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_of(server, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_is_told_of_each_change(server: GrpcServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="test.v1.Service"))
        seen = [(await watch.read()).status]
        for ready in (True, False, True):
            await server.set_ready(ready)
            seen.append((await watch.read()).status)
        assert seen == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]


async def test_reflection_lists_the_services(server: GrpcServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
        names = {service.name for service in answer.list_services_response.service}
    assert names == {"test.v1.Service", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_messages_may_be_large_but_not_boundless(server: GrpcServer) -> None:
    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_unary("/test.v1.Service/Echo")
        data = b"x" * (16 * 2**20)
        assert await call(data) == data
    async with grpc.aio.insecure_channel(
        server.address, options=[("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES)]
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.v1.Service/Echo")(b"x" * (MAX_MESSAGE_BYTES + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_running_call_may_end_while_stopping() -> None:
    server, echo = GrpcServer("127.0.0.1:0", []), Echo()
    server.register(lambda handler, target: target.add_generic_rpc_handlers([handler]), echo)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = asyncio.ensure_future(channel.unary_unary("/test.v1.Service/Wait")(b"late"))
        await channel.unary_unary("/test.v1.Service/Echo")(b"")
        stop = asyncio.create_task(server.stop(30))
        await asyncio.sleep(0.05)
        echo.release.set()
        assert await call == b"late"
        await stop


async def test_a_unix_socket_serves_too(tmp_path: Path) -> None:
    server = GrpcServer(f"unix:{tmp_path}/s", [])
    await server.start()
    assert server.address == f"unix:{tmp_path}/s"
    assert await health_of(server, "liveness") == SERVING
    await server.stop(0)


async def test_an_address_in_use_is_said(server: GrpcServer) -> None:
    with pytest.raises(ListenError, match=server.address):
        await GrpcServer(server.address, []).start()
