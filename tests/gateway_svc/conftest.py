"""The gateway's real HTTP server in front of a planner that a test scripts, and clients of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from support.fake_planner import FakePlanner, RunningPlanner, fake_planner

from gateway_svc.server import GatewayServer
from svc_common.config import GatewayConfig

StartGateway = Callable[..., Awaitable[str]]


@pytest.fixture
async def planner() -> AsyncIterator[RunningPlanner]:
    async with fake_planner() as running:
        yield running


@pytest.fixture
def fake(planner: RunningPlanner) -> FakePlanner:
    return planner.fake


@pytest.fixture
async def start_gateway(planner: RunningPlanner) -> AsyncIterator[StartGateway]:
    """Starts a gateway with these keys of [gateway]; returns its URL."""
    async with AsyncExitStack() as stack:

        async def start(**keys: Any) -> str:
            config = GatewayConfig.model_validate({"listen": "127.0.0.1:0", "min_drain_s": 0, **keys})
            server = GatewayServer(config, planner.address, grace_s=5)
            await server.start()
            stack.push_async_callback(server.stop)
            return f"http://{server.address}"

        yield start


@pytest.fixture
async def http(start_gateway: StartGateway) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=await start_gateway()) as client:
        yield client


@pytest.fixture
async def openai(http: httpx2.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's own client of the same gateway. Does not try again, so that errors show."""
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client
