"""Callers that hang up, servers that stop, and the process itself."""

import asyncio
import json
import logging
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.fake_planner import Answer, FakePlanner, RunningPlanner
from support.stacks import own_environment

from gateway_svc.server import GatewayServer, listening_socket
from svc_common.config import GatewayConfig
from svc_common.grpc_server import ListenError

HI: Any = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


async def cancelled(fake: FakePlanner, times: int = 1) -> None:
    async with asyncio.timeout(30):
        for _ in range(times):
            await fake.cancelled.acquire()


@pytest.mark.parametrize("n", [1, 3])
async def test_hanging_up_ends_a_stream(n: int, http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    fake.answer = Answer(hold=asyncio.Event())
    body = {"messages": HI, "stream": True, "n": n}
    async with http.stream("POST", CHAT, json=body) as response:
        await anext(response.aiter_bytes())
    await cancelled(fake, n)
    assert fake.running == 0
    labels = 'error_type="client_disconnected",http_request_method="POST",http_response_status_code="499"'
    text = (await http.get("/metrics")).text
    assert f'http_server_request_duration_seconds_count{{{labels},http_route="{CHAT}"}} 1.0' in text


@pytest.mark.parametrize("n", [1, 3])
async def test_hanging_up_ends_what_is_not_streamed(n: int, http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    fake.answer = Answer(hold=asyncio.Event())
    posting = asyncio.create_task(http.post(CHAT, json={"messages": HI, "n": n}))
    await fake.until_running(n)
    posting.cancel()
    await cancelled(fake, n)
    assert fake.running == 0


async def test_half_of_many_callers_hang_up(start_gateway: Any, fake: FakePlanner) -> None:
    """At any moment; the others get their answers, and nothing goes on."""
    fake.answer = Answer(pieces=["x"] * 30)
    chance = random.Random(0)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=await start_gateway(), limits=limits, timeout=60) as client:

        async def call(number: int) -> str:
            body = {"messages": HI, "stream": number % 4 < 2}
            text = ""
            async with client.stream("POST", CHAT, json=body) as response:
                async for part in response.aiter_text():
                    text += part
                    if number % 2 and chance.random() < 0.3:
                        return ""
            return text

        texts = await asyncio.gather(*(call(number) for number in range(60)))
        for text in texts[::4]:
            assert text.endswith("data: [DONE]\n\n")
        for text in texts[2::4]:
            assert json.loads(text)["choices"][0]["message"]["content"] == "x" * 30
        await fake.until_running(0)
        assert "http_server_active_requests 1.0" in (await client.get("/metrics")).text


async def test_a_quiet_stream_is_kept_alive(
    http: httpx2.AsyncClient, fake: FakePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.answers._KEEP_ALIVE_S", 0.05)
    hold = asyncio.Event()
    fake.answer = Answer(hold=hold)
    text = ""
    async with http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response:
        async for part in response.aiter_text():
            text += part
            if ": keep-alive" in text:
                hold.set()
    assert text.endswith("data: [DONE]\n\n")


async def test_stopping_lets_streams_end_and_refuses_the_new(planner: RunningPlanner) -> None:
    hold = asyncio.Event()
    planner.fake.answer = Answer(hold=hold)
    server = GatewayServer(GatewayConfig(listen="127.0.0.1:0", min_drain_s=0), planner.address, grace_s=30)
    await server.start()
    async with httpx2.AsyncClient(base_url=f"http://{server.address}") as client:
        async with client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response:
            parts = response.aiter_text()
            text = await anext(parts)
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0)  # It has begun.
            for path, body in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "Hi"})):
                refused = await client.post(path, json=body)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.headers["connection"] == "close"
                assert refused.json()["error"]["code"] == "draining"
            assert (await client.get("/v1/models")).status_code == 503
            for path, status in (("/health", 503), ("/health/ready", 503), ("/health/live", 200), ("/metrics", 200)):
                assert (await client.get(path)).status_code == status
            assert len(planner.fake.requests) == 1
            hold.set()
            async for part in parts:
                text += part
        assert text.endswith("data: [DONE]\n\n")
        await stopping


async def test_stopping_ends_streams_whose_time_is_up(planner: RunningPlanner) -> None:
    planner.fake.answer = Answer(hold=asyncio.Event())
    server = GatewayServer(GatewayConfig(listen="127.0.0.1:0", min_drain_s=0), planner.address, grace_s=1)
    await server.start()
    async with (
        httpx2.AsyncClient(base_url=f"http://{server.address}") as client,
        client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response,
    ):
        await anext(response.aiter_text())
        await server.stop()
        await cancelled(planner.fake)


async def test_stopping_with_nothing_in_hand_ends_at_once(planner: RunningPlanner) -> None:
    server = GatewayServer(GatewayConfig(listen="127.0.0.1:0", min_drain_s=0), planner.address, grace_s=600)
    await server.start()
    async with httpx2.AsyncClient(base_url=f"http://{server.address}") as client:
        assert (await client.post(CHAT, json={"messages": HI})).status_code == 200
        await server.stop()  # Its connection is still open.
        with pytest.raises(httpx2.TransportError):
            await client.post(CHAT, json={"messages": HI})


async def refuses(client: httpx2.AsyncClient) -> bool:
    response = await client.post(CHAT, json={"messages": HI})
    return (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("min_drain_s", [0, 600])
async def test_it_says_that_it_drains_until_the_planner_has_ended(min_drain_s: float, planner: RunningPlanner) -> None:
    """With nothing in hand: a planner that drains, or at first knows of nothing yet."""
    config = GatewayConfig(listen="127.0.0.1:0", min_drain_s=min_drain_s)
    server = GatewayServer(config, planner.address, grace_s=600)
    await server.start()
    await planner.server.set_ready(bool(min_drain_s))
    async with asyncio.timeout(60), httpx2.AsyncClient(base_url=f"http://{server.address}") as client:
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)  # It has begun.
        for _ in range(3):
            assert await refuses(client)
            await asyncio.sleep(0.15)  # It looks at the planner meanwhile.
        await planner.server.set_ready(False)
        assert await refuses(client)
        assert not stopping.done()
        await planner.server.stop(0)
        await stopping
        with pytest.raises(httpx2.TransportError):
            await client.post(CHAT, json={"messages": HI})


async def test_beside_a_planner_that_goes_on_it_ends_when_its_time_is_up(
    planner: RunningPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("gateway_svc.server.monotonic", lambda: now_s)
    server = GatewayServer(GatewayConfig(listen="127.0.0.1:0"), planner.address, grace_s=600)
    await server.start()
    async with asyncio.timeout(60), httpx2.AsyncClient(base_url=f"http://{server.address}") as client:
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        now_s = 1004.9
        assert await refuses(client)
        assert not stopping.done()
        now_s = 1005.0
        await stopping


async def test_each_request_leaves_one_line(
    http: httpx2.AsyncClient, fake: FakePlanner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    secret = "a secret that nobody may read"
    body = {"messages": [{"role": "user", "content": secret}]}
    await http.post(CHAT, json=body, headers={"x-request-id": "req-7"})
    await http.post("/nowhere", json=body, headers={"x-request-id": "req-8"})
    for path in ("/health", "/health/live", "/metrics", "/console/state"):
        await http.get(path)
    records = [vars(record) for record in caplog.records if record.name == "gateway_svc.access_log"]
    names = ("method", "route", "status", "error")
    assert [{name: record[name] for name in names if name in record} for record in records] == [
        {"method": "POST", "route": CHAT, "status": 200},
        {"method": "POST", "route": "other", "status": 404},
    ]
    assert all(record["duration_s"] > 0 for record in records)
    assert secret not in caplog.text
    assert fake.metadata[0]["x-request-id"] == "req-7"


async def test_a_unix_socket(planner: RunningPlanner, tmp_path: Path) -> None:
    server = GatewayServer(GatewayConfig(listen=f"unix:{tmp_path}/http", min_drain_s=0), planner.address, grace_s=1)
    await server.start()
    transport = httpx2.AsyncHTTPTransport(uds=str(tmp_path / "http"))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.post(CHAT, json={"messages": HI})).status_code == 200
    await server.stop()


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    with listening_socket("127.0.0.1:0") as listener:
        transports: list[asyncio.BaseTransport] = []
        accepted = asyncio.Event()

        class Noting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transports.append(transport)
                accepted.set()

        server = await asyncio.get_running_loop().create_server(Noting, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        await accepted.wait()
        connection = transports[0].get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        writer.close()
        server.close()


async def test_a_taken_address(planner: RunningPlanner) -> None:
    server = GatewayServer(GatewayConfig(listen=planner.address), planner.address, grace_s=1)
    with pytest.raises(ListenError, match="Address already in use"):
        await server.start()


async def spawn(config: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway_svc",
        "--config",
        str(config),
        stderr=asyncio.subprocess.PIPE,
        env=own_environment(),
    )


async def test_the_process_serves_and_drains(planner: RunningPlanner, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[planner]\nlisten = "{planner.address}"\n[gateway]\nlisten = "127.0.0.1:0"\nmin_drain_s = 0\n')
    hold = asyncio.Event()
    planner.fake.answer = Answer(hold=hold)
    process = await spawn(config)
    assert process.stderr is not None
    try:
        line = (await process.stderr.readline()).decode()
        address = line.partition("listening on ")[2].partition(",")[0]
        async with (
            httpx2.AsyncClient(base_url=f"http://{address}") as client,
            client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response,
        ):
            parts = response.aiter_text()
            text = await anext(parts)
            process.send_signal(signal.SIGTERM)
            assert b"draining" in await process.stderr.readline()
            hold.set()
            async for part in parts:
                text += part
        assert text.endswith("data: [DONE]\n\n")
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("gateway", "complaint"),
    [
        ('listen = "nobody"', "gateway.listen"),
        ('api_keys_file = "/nowhere"', "gateway.api_keys_file: /nowhere: No such file"),
        ('planner_key_file = "/nowhere"', "gateway.planner_key_file: /nowhere: No such file"),
        ('certificate = "/c"\nkey = "/nowhere"', "gateway.certificate: /c: No such file"),
        ("max_body_bytes = 1", "gateway.max_body_bytes"),
    ],
)
async def test_what_cannot_be_served_is_said_in_one_line(gateway: str, complaint: str, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"[gateway]\n{gateway}\n")
    process = await spawn(config)
    _, errors = await process.communicate()
    [line] = errors.decode().splitlines()
    assert (process.returncode, line.startswith("gateway_svc: ")) == (2, True)
    assert complaint in line
