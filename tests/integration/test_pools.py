"""Two CPU attention services, one of which is killed under load: nobody notices but by the time it takes."""

import asyncio
import os
import signal

from support.executor import cpu_attention_status

from neoflex import AsyncClient, Client

NUM_TOKENS = 40
SERVICE = {"kv_bytes": "96MiB", "num_threads": 1}


def answers(stack, prompts, kill=None) -> list[list[int]]:
    """Greedy answers to all prompts at once; the service named `kill` is ended once each has begun."""

    async def run() -> list[list[int]]:
        async with AsyncClient(stack.address) as client:
            num_begun = 0
            all_begun = asyncio.Event()

            async def read(prompt) -> list[int]:
                nonlocal num_begun
                tokens: list[int] = []
                async for delta in client.stream(
                    token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                ):
                    num_begun += not tokens
                    tokens += delta.token_ids
                    if num_begun == len(prompts):
                        all_begun.set()
                return tokens

            readers = [asyncio.create_task(read(prompt)) for prompt in prompts]
            if kill:
                await all_begun.wait()
                os.kill(stack.pids[kill], signal.SIGKILL)
            async with asyncio.timeout(120):
                return list(await asyncio.gather(*readers))

    return asyncio.run(run())


def test_a_killed_service_costs_no_stream_a_token(start, prompts):
    stack = start(planner={"mode": "asymmetric"}, gpu={"kv_bytes": 0}, cpu_attn=[SERVICE, SERVICE])
    shortest = sorted(prompts, key=len)[:6]
    undisturbed = answers(stack, shortest)
    with Client(stack.address) as client:
        pools = client.server_info().host_pools
        assert [pool.num_threads for pool in pools] == [1, 1]
        assert all(pool.num_blocks > 0 for pool in pools)
    # Both had work.
    assert all(cpu_attention_status(stack, index).iterations > 0 for index in (0, 1))
    assert answers(stack, shortest, kill="cpu_attn_svc-1") == undisturbed
    with Client(stack.address) as client:
        while not all(pool.num_blocks for pool in client.server_info().host_pools):
            client.generate(token_ids=shortest[0], max_tokens=1)
        assert client.server_info().host_pools == pools
    assert answers(stack, shortest) == undisturbed
    assert all(cpu_attention_status(stack, index).iterations > 0 for index in (0, 1))
    with Client(stack.address) as client:
        assert client.load().host_pool_blocks_used == (0, 0)
