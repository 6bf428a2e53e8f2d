"""Starts planners for the tests of this folder."""

from collections.abc import AsyncIterator

import grpc
import pytest
from support.fake_workers import FakeExecutor, FakeHost
from support.planner_rig import MODEL, Rig, StartRig

from planner_svc.server import PlannerServer
from planner_svc.servicer import ServedModel
from svc_common.config import parse


@pytest.fixture
async def start_rig() -> AsyncIterator[StartRig]:
    """Called with an executor, a host or None, a model, and values for the host's and the planner's section."""
    rigs: list[Rig] = []

    async def start(
        executor: FakeExecutor | None = None,
        host: FakeHost | list[FakeHost] | None = None,
        ready: bool = True,
        model: ServedModel = MODEL,
        cpu_attn: dict[str, object] | None = None,
        logging: dict[str, object] | None = None,
        **planner: object,
    ) -> Rig:
        executor = executor or FakeExecutor()
        hosts = host if isinstance(host, list) else [host] if host else []
        executor.hosts = hosts
        executor.model_digest = executor.model_digest or model.spec.digest
        config = parse(
            {
                "planner": {"listen": "127.0.0.1:0", **planner},
                "gpu": {"listen": await executor.start()},
                "logging": logging or {},
                "cpu_attn": [{"listen": await item.start(), **(cpu_attn or {})} for item in hosts] or {"kv_bytes": 0},
            },
            "test",
        )
        server = PlannerServer(config, model)
        await server.start()
        rig = Rig(server, executor, hosts, grpc.aio.insecure_channel(server.address))
        rigs.append(rig)
        if ready:
            await rig.until_ready()
        return rig

    yield start
    for rig in rigs:
        await rig.channel.close()
        await rig.server.stop(0)
        await rig.executor.kill()
        for item in rig.hosts:
            if item.alive:
                await item.kill()
        assert rig.executor.problems == []
