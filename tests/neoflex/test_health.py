"""`neoflex health`: what it says of services that are well, that are not, and that are not there."""

import asyncio
import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.command import Run

from neoflex.health import complaint
from svc_common.grpc_server import GrpcServer

SERVICE = "neoflex.v1.Some"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(f"unix:{tmp_path}/s", [SERVICE])
    await server.start()
    yield server
    await server.stop(0)


async def asked(server: GrpcServer, service: str) -> str | None:
    return await asyncio.to_thread(complaint, server.address, service, 20.0)


async def test_each_name_is_asked_for_by_itself(server: GrpcServer) -> None:
    assert await asked(server, "liveness") is None
    assert await asked(server, "readiness") == f"{server.address}: readiness is NOT_SERVING"
    await server.set_ready(True)
    for name in ("readiness", SERVICE, ""):
        assert await asked(server, name) is None
    await server.set_alive(False)
    assert await asked(server, "liveness") == f"{server.address}: liveness is NOT_SERVING"
    assert await asked(server, "nobody") == f"{server.address}: has no service named 'nobody'"


class _Gateway(http.server.BaseHTTPRequestHandler):
    """Alive and not ready."""

    def do_GET(self) -> None:
        self.send_response({"/health/live": 200, "/health/ready": 503}[self.path])
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def gateway() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_gateway_is_asked_by_http(gateway: str) -> None:
    assert complaint(gateway, "liveness", 20) is None
    assert complaint(gateway, "readiness", 20) == f"{gateway}: readiness is 503 Service Unavailable"
    assert complaint(gateway, SERVICE, 20) == f"{gateway}: by HTTP there are readiness and liveness, not '{SERVICE}'"


def test_the_command_says_why_and_ends_with_1(run: Run, gateway: str, tmp_path: Path) -> None:
    assert run("health", gateway, "--service", "liveness").code == 0
    ended = run("health", gateway)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: {gateway}: readiness is 503 Service Unavailable\n"
    nobody = f"unix:{tmp_path}/nobody"
    ended = run("health", nobody)
    assert ended.code == 1
    assert ended.err.startswith(f"error: {nobody}: UNAVAILABLE: ")
    assert run("health", "http://127.0.0.1:1").err == "error: http://127.0.0.1:1: Connection refused\n"
    assert run("health", "nowhere").code == 2
