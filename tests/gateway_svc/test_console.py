"""The console's paths: files for anybody, figures and iterations for whoever may call."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.fake_planner import FakePlanner, RunningPlanner
from support.traces import decoupled, gpu_only, pipelined

from gateway_svc.server import GatewayServer
from neoflex.v1 import inference_pb2 as pb
from svc_common.config import GatewayConfig

FILES = ("/", "/console/console.css", "/console/main.js", "/console/icon.svg")
STATE, ITERATIONS = "/console/state", "/console/iterations"


async def events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def take(client: httpx2.AsyncClient, number: int) -> list[dict[str, Any]]:
    """The first iterations of a new stream."""
    got: list[dict[str, Any]] = []
    async with asyncio.timeout(30), client.stream("GET", ITERATIONS) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for event in events(response):
            got.append(event)
            if len(got) == number:
                break
    return got


async def test_the_page_and_its_files(http: httpx2.AsyncClient) -> None:
    kinds = []
    for path in FILES:
        response = await http.get(path)
        assert (response.status_code, response.headers["x-content-type-options"]) == (200, "nosniff")
        policy = dict(part.split(maxsplit=1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        kinds.append(response.headers["content-type"].partition(";")[0])
    assert kinds == ["text/html", "text/css", "text/javascript", "image/svg+xml"]
    page = (await http.get("/")).text
    assert "://" not in page
    assert "style=" not in page
    assert (await http.get("/console/nothing.js")).status_code == 404


async def test_state(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    chat = pb.ServiceClass(name="chat", is_default=True, requests_in_time=6, requests_late=1, requests_refused=2)
    chat.targets.ttft.FromMilliseconds(500)
    chat.targets.tpot.FromMilliseconds(50)
    fake.server_info = pb.GetServerInfoResponse(
        version="1.2",
        uptime_s=12.5,
        device="cpu",
        block_tokens=16,
        block_bytes=1024,
        host_block_bytes=512,
        host_pools=[
            pb.HostPoolInfo(num_blocks=30, num_threads=2, min_threads=1, max_threads=3),
            pb.HostPoolInfo(error="connection refused"),
        ],
        service_classes=[chat, pb.ServiceClass(name="batch")],
        counters=pb.ServerCounters(
            generated_tokens=50, prefilled_tokens=100, cached_tokens=32, executor_busy_ns=4_500_000_000,
            cpu_wait_ns=500_000_000, cpu_attention_ns=250_000_000, gpu_only_iterations=4, asymmetric_iterations=3,
            same_layer_iterations=2, decoupled_iterations=1,
        ),
    )  # fmt: skip
    fake.load = pb.GetLoadResponse(
        running_requests=2, waiting_requests=3, max_waiting_requests=64, gpu_blocks_used=10, gpu_blocks_total=20,
        host_pool_blocks_used=[5], classes=[pb.ClassLoad(name="chat", waiting_requests=3, running_requests=1)],
    )  # fmt: skip
    response = await http.get(STATE)
    assert response.headers["cache-control"] == "no-store"
    pool = {"used": 5, "total": 30, "block_bytes": 512, "threads": 2, "min_threads": 1, "max_threads": 3, "error": ""}
    lost = {"used": 0, "total": 0, "threads": 0, "min_threads": 0, "max_threads": 0, "error": "connection refused"}
    none = {"ttft_ms": None, "tpot_ms": None, "waiting": 0, "running": 0, "in_time": 0, "late": 0, "refused": 0}
    assert response.json() == {
        "model": {"name": "tiny", "context_tokens": 2048},
        "version": "1.2",
        "device": "cpu",
        "uptime_s": 12.5,
        "requests": {"running": 2, "waiting": 3, "max_waiting": 64},
        "gpu": {"used": 10, "total": 20, "block_bytes": 1024},
        "pools": [pool, {**pool, **lost}],
        "block_tokens": 16,
        "classes": [
            {"name": "chat", "is_default": True, "ttft_ms": 500, "tpot_ms": 50, "waiting": 3, "running": 1}
            | {"in_time": 6, "late": 1, "refused": 2},
            {"name": "batch", "is_default": False, **none},
        ],
        "counters": {
            "generated_tokens": 50,
            "prefilled_tokens": 100,
            "cached_tokens": 32,
            "executor_busy_s": 4.5,
            "cpu_wait_s": 0.5,
            "cpu_attention_s": 0.25,
        },
        "iterations": {"gpu_only": 4, "asymmetric": 3, "same_layer": 2, "decoupled": 1},
    }


async def test_iterations_with_what_each_lane_did(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    fake.traces.traces = [pipelined(7, 5_000_000, unit_ns=1000)]
    assert await take(http, 1) == [
        {
            "epoch": 1,
            "iteration": 7,
            "mode": "asymmetric",
            "start_us": 5000,
            "duration_us": 100,
            "predicted_us": 0,
            "prefill_tokens": 7,
            "gpu_decodes": 3,
            "cpu_decodes": 3,
            "gpu": [
                ["other", -1, 0, 10],
                ["linear", 1, 10, 10],
                ["linear", 0, 22, 8],
                ["linear", 1, 45, 15],
                ["linear", 0, 66, 14],
                ["linear", -1, 84, 16],
            ],
            "links": [["copy", 1, 20, 2], ["copy", 0, 30, 2]],
            "cpu": [[["attention", 1, 25, 17], ["attention", 0, 42, 22]]],
        }
    ]


async def test_neighbours_of_a_kind_are_one(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    fake.traces.traces = [gpu_only(1, 0), decoupled(2, 200)]
    first, second = await take(http, 2)
    assert (first["mode"], second["mode"]) == ("gpu_only", "decoupled")
    # All of them shorter than a microsecond.
    assert first["gpu"] == [["other", -1, 0, 0], ["linear", 0, 0, 0]]
    assert [segment[:2] for segment in second["gpu"]] == [
        ["other", -1], ["linear", 2], ["linear", 0], ["linear", 2], ["linear", -1],
    ]  # fmt: skip


async def test_iterations_come_in_bursts_and_end_with_their_reader(
    http: httpx2.AsyncClient, fake: FakePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.console.routes._PAUSE_S", 0.0)
    fake.traces.traces = [gpu_only(number, 100 * number) for number in range(20)]
    got = await take(http, 17)
    assert [item["iteration"] for item in got] == [*range(8), *range(8), 0]
    async with asyncio.timeout(30):
        for _ in range(3):
            await fake.traces.ended.acquire()


async def test_a_burst_of_many_layers_is_shorter(
    http: httpx2.AsyncClient, fake: FakePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.console.routes._PAUSE_S", 0.0)
    monkeypatch.setattr("gateway_svc.console.routes._BURST_EVENTS", 5)
    fake.traces.traces = [gpu_only(number, 100 * number) for number in range(20)]
    assert [item["iteration"] for item in await take(http, 4)] == [0, 1, 0, 1]


async def test_a_server_without_work_keeps_the_stream(
    http: httpx2.AsyncClient, fake: FakePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.console.routes._PAUSE_S", 0.0)
    monkeypatch.setattr("gateway_svc.console.routes._QUIET_S", 0.05)
    async with asyncio.timeout(30), http.stream("GET", ITERATIONS) as response:
        lines = response.aiter_lines()
        while await anext(lines) != ": keep-alive":
            pass
        fake.traces.traces = [gpu_only(3, 0)]
        async for line in lines:
            if line.startswith("data: "):
                assert json.loads(line.removeprefix("data: "))["iteration"] == 3
                break


async def test_a_planner_that_is_lost(http: httpx2.AsyncClient, planner: RunningPlanner) -> None:
    await planner.server.stop(0)
    response = await http.get(STATE)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "service_unavailable_error")
    async with asyncio.timeout(30):
        response = await http.get(ITERATIONS)
    assert "event: error\n" in response.text
    assert '"service_unavailable_error"' in response.text


async def test_a_page_does_not_hold_up_the_end(planner: RunningPlanner) -> None:
    server = GatewayServer(GatewayConfig(listen="127.0.0.1:0", min_drain_s=0), planner.address, grace_s=600)
    planner.fake.traces.traces = [gpu_only(1, 0)]
    await server.start()
    async with asyncio.timeout(30), httpx2.AsyncClient(base_url=f"http://{server.address}") as client:
        async with client.stream("GET", ITERATIONS) as response:
            received = events(response)
            await anext(received)
            stopping = asyncio.create_task(server.stop())
            assert [event async for event in received] == []
        await stopping


async def test_keys_guard_the_figures(start_gateway: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first")
    async with httpx2.AsyncClient(base_url=await start_gateway(api_keys_file=keys)) as client:
        for path in FILES:
            assert (await client.get(path)).status_code == 200
        for path in (STATE, ITERATIONS):
            assert (await client.get(path)).status_code == 401
        assert (await client.get(STATE, headers={"authorization": "Bearer first"})).status_code == 200


async def test_it_can_be_left_out(start_gateway: Any) -> None:
    async with httpx2.AsyncClient(base_url=await start_gateway(console=False)) as client:
        for path in (*FILES, STATE, ITERATIONS):
            assert (await client.get(path)).status_code == 404
