"""Requests that end early: cancelled, past their deadline, refused, or struck by a dead service."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from support.blocks import blocks_held
from support.executor import executor_status

from neoflex import AsyncClient, Client, NeoflexError
from neoflex.supervisor import LocalStack

MIXED = {"gpu": {"kv_bytes": "8MiB"}, "cpu_attn": {"kv_bytes": "128MiB"}}


def iterations_until_free(stack: LocalStack) -> int:
    """Iterations the executor ends before every process has let go of all blocks."""
    start = executor_status(stack).last_iteration
    deadline = time.monotonic() + 30
    while any(blocks_held(stack)):
        assert time.monotonic() < deadline, blocks_held(stack)
        time.sleep(0.01)
    return executor_status(stack).last_iteration - start


def test_cancelling_frees_blocks_in_all_three_processes(start, prompts):
    stack = start(**MIXED)

    async def run() -> None:
        async with AsyncClient(stack.address) as client:

            async def read_three(prompt):
                stream = client.stream(token_ids=prompt, max_tokens=1000, ignore_eos=True)
                seen = 0
                async for delta in stream:
                    seen += len(delta.token_ids)
                    if seen >= 3:
                        break
                await stream.aclose()

            await asyncio.gather(*(read_three(prompt) for prompt in prompts))

    asyncio.run(run())
    # What is left to run: the plan under way, the one that waits, and the one that releases.
    assert iterations_until_free(stack) <= 3


def test_a_deadline_frees_blocks(start, prompts):
    stack = start(**MIXED)
    with Client(stack.address) as client, pytest.raises(NeoflexError) as caught:
        client.generate(token_ids=prompts[0], max_tokens=2000, ignore_eos=True, timeout=1.5)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert iterations_until_free(stack) <= 3


def test_bad_requests_are_refused_before_they_cost_anything(start, prompts):
    stack = start(**MIXED)
    bad = {
        "request.stopping.max_tokens": {"token_ids": prompts[0], "max_tokens": 100_000},
        "request.token_ids": {"token_ids": [10**6]},
        "request.sampling.top_p": {"token_ids": prompts[0], "top_p": 1.5},
        "request.sampling.temperature": {"token_ids": prompts[0], "temperature": -1.0},
    }
    with Client(stack.address) as client:
        for field, arguments in bad.items():
            with pytest.raises(NeoflexError) as caught:
                client.generate(**arguments)
            assert caught.value.code == "INVALID_ARGUMENT"
            assert [violation.field for violation in caught.value.violations] == [field] or any(
                violation.field.startswith(field) for violation in caught.value.violations
            )
        with pytest.raises(NeoflexError) as caught:
            client.generate(token_ids=prompts[0] * 2000, max_tokens=1)
        assert caught.value.code == "INVALID_ARGUMENT"
        assert "8192" in str(caught.value).replace(",", "")
    assert executor_status(stack).last_iteration == 0


def test_a_frozen_executor_is_awaited(start, prompts):
    """No connection breaks when a process is stopped. Once it is back, its streams go on with the same tokens."""
    stack = start(**MIXED)
    pid = stack.pids["gpu_svc"]
    with Client(stack.address, max_retries=0) as client:
        whole = client.generate(token_ids=prompts[0], max_tokens=200, temperature=0.0, ignore_eos=True)
        stream = client.stream(token_ids=prompts[0], max_tokens=200, temperature=0.0, ignore_eos=True)
        first = next(stream)
        os.kill(pid, signal.SIGSTOP)
        try:
            while not stack.server_info().counters.executor_losses:
                time.sleep(0.05)
            with pytest.raises(NeoflexError) as caught:
                client.generate(token_ids=prompts[0], max_tokens=1)
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "EXECUTOR_LOST")
        finally:
            os.kill(pid, signal.SIGCONT)
        rest = [token for delta in stream for token in delta.token_ids]
        assert (*first.token_ids, *rest) == whole.token_ids
    iterations_until_free(stack)


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("mode", ["asymmetric", "decoupled"])
def test_killing_cpu_attention_ends_its_streams_clearly(start, prompts, tmp_path, mode):
    stack = start(
        planner={"mode": mode},
        gpu={"kv_bytes": "0"},
        cpu_attn={"kv_bytes": "128MiB", "segment_dir": str(tmp_path)},
    )

    async def run() -> list[tuple[str, float]]:
        async with AsyncClient(stack.address) as client:
            started = asyncio.Event()
            outcomes: list[tuple[str, float]] = []

            async def read(prompt):
                try:
                    async for _ in client.stream(token_ids=prompt, max_tokens=1000, ignore_eos=True):
                        started.set()
                except NeoflexError as error:
                    outcomes.append((error.code, time.monotonic()))

            readers = [asyncio.create_task(read(prompt)) for prompt in prompts[:4]]
            await started.wait()
            killed = time.monotonic()
            os.kill(stack.pids["cpu_attn_svc"], signal.SIGKILL)
            async with asyncio.timeout(30):
                await asyncio.gather(*readers)
            return [(code, when - killed) for code, when in outcomes]

    outcomes = asyncio.run(run())
    assert [code for code, _ in outcomes] == ["UNAVAILABLE"] * 4
    assert max(seconds for _, seconds in outcomes) < 2.0
    # The supervisor restarts it; the same stack serves again, and no segment is left.
    with Client(stack.address) as client:
        stack.wait_ready(60)
        deadline = time.monotonic() + 60
        while client.server_info().host_blocks == 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(client.generate(token_ids=prompts[0], max_tokens=8, ignore_eos=True).token_ids) == 8
    assert segments(tmp_path) == []
    stack.stop()
    assert segments(tmp_path) == []
