"""The planner gives attention on the CPU another thread while the executor waits for it, and takes it back after."""

import asyncio
import contextlib
import itertools

import pytest
from support.executor import cpu_attention_status

from neoflex import AsyncClient
from neoflex.types import ServerInfo
from svc_common.cores import usable_cores

NUM_CLIENTS = 8
PROMPT_TOKENS, NEW_TOKENS = 192, 1800


@pytest.mark.skipif(usable_cores() < 2, reason="a second thread needs a second core")
def test_threads_follow_the_load(start, prompts):
    stack = start(
        planner={"mode": "asymmetric"},
        # All KV on the host, in the type and with the kernel that take longest: the executor waits for it, the more the
        # longer the answers grow.
        kv={"dtype": "fp16"},
        gpu={"kv_bytes": 0, "num_threads": 1},
        cpu_attn={"kv_bytes": "400MiB", "instruction_set": "scalar", "elastic": True, "max_threads": 2},
    )
    history = []

    async def look(client: AsyncClient) -> ServerInfo:
        info = await client.server_info()
        if info.cpu_attention_threads not in history[-1:]:
            history.append(info.cpu_attention_threads)
        await asyncio.sleep(0.05)
        return info

    async def keep_busy(client: AsyncClient) -> None:
        for first in itertools.count():
            tokens = prompts[-1][first % 1000 :][:PROMPT_TOKENS]
            await client.generate(token_ids=tokens, max_tokens=NEW_TOKENS, ignore_eos=True, timeout=600)

    async def run() -> ServerInfo:
        async with AsyncClient(stack.address) as client:
            info = await look(client)
            assert info.counters.cpu_threads_grown == 0
            load = [asyncio.create_task(keep_busy(client)) for _ in range(NUM_CLIENTS)]
            while 2 not in history:
                await look(client)
                for task in load:
                    assert not task.done()
            for task in load:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            while history[-1] != 1:
                await look(client)
            return await look(client)

    info = asyncio.run(run())
    assert history[:2] == [1, 2]
    assert (info.cpu_attention_min_threads, info.cpu_attention_max_threads) == (1, 2)
    assert info.counters.cpu_threads_grown >= 1
    assert info.counters.cpu_threads_shrunk >= 1
    assert cpu_attention_status(stack).num_threads == 1
    log = stack.log_paths["planner_svc"].read_text()
    assert "CPU attention threads of pool 0: 1 -> 2: the executor waits" in log
    print(*(line for line in log.splitlines() if "CPU attention threads" in line), sep="\n")
