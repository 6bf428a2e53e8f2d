"""Signals to the real services with streams in flight: whoever is told to stop, no answer that could end is cut off."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from support.executor import executor_status
from support.reference import Verdict
from support.stacks import until

from neoflex import AsyncClient, NeoflexError
from neoflex.logs import last_lines
from neoflex.supervisor import LocalStack

TOKENS = 48
MANY_TOKENS = 400
NUM_PROMPTS = 6


@asynccontextmanager
async def streams(stack: LocalStack, prompts: list[list[int]]) -> AsyncIterator["list[asyncio.Task[list[int]]]"]:
    """Answers in flight: each has its first token."""
    async with AsyncClient(stack.address, max_retries=0) as client:
        num_begun = asyncio.Semaphore(0)

        async def read(prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            async for delta in client.stream(token_ids=prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True):
                if not tokens:
                    num_begun.release()
                tokens += delta.token_ids
            return tokens

        tasks = [asyncio.create_task(read(prompt)) for prompt in prompts]
        for _ in tasks:
            await num_begun.acquire()
        yield tasks


async def read_events(url: str, begun: asyncio.Event) -> str:
    """A stream by HTTP, to its end."""
    text = ""
    body = {"prompt": "The capital of France is", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    async with (
        httpx2.AsyncClient(base_url=url, timeout=120) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for part in response.aiter_text():
            begun.set()
            text += part
    return text


async def until_unready(client: AsyncClient) -> None:
    while True:
        if not await client.is_ready():
            return
        await asyncio.sleep(0.01)


def judge(reference, prompts, answers) -> None:
    verdict = Verdict()
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == TOKENS
        reference.judge(prompt, tokens, verdict)
    assert not verdict.mismatches, str(verdict)


def test_all_are_told_to_stop_at_the_same_moment(start, prompts, reference):
    """As `docker stop` of a whole stack does. Some sequences are on the GPU, some on the host."""
    stack = start(
        planner={"mode": "asymmetric", "drain_s": 120},
        gpu={"kv_bytes": "8MiB"},
        cpu_attn={"kv_bytes": "128MiB"},
        gateway={"listen": "127.0.0.1:0"},
        logging={"format": "json"},
    )
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for name, child in stack._children.items():
        child.forbid_restarts()
        assert child._process is not None
        processes[name] = child._process
    assert set(processes) == {"planner_svc", "gpu_svc", "cpu_attn_svc", "gateway_svc"}

    async def run() -> list[list[int]]:
        begun = asyncio.Event()
        by_http = asyncio.create_task(read_events(stack.http_url, begun))
        async with streams(stack, prompts[:NUM_PROMPTS]) as running:
            await begun.wait()
            assert not any(task.done() for task in (*running, by_http))
            assert (await asyncio.to_thread(executor_status, stack)).host_blocks_used > 0
            for process in processes.values():
                process.send_signal(signal.SIGTERM)
            async with AsyncClient(stack.address, max_retries=0) as late:
                await until_unready(late)
                with pytest.raises(NeoflexError) as refused:
                    await late.generate(token_ids=prompts[0], max_tokens=1)
            assert (refused.value.reason, refused.value.retry_after_s) == ("DRAINING", 1.0)
            answers = await asyncio.gather(*running)
        assert (await by_http).endswith("data: [DONE]\n\n")
        return answers

    answers = asyncio.run(run())
    until(lambda: all(process.returncode is not None for process in processes.values()))
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0)
    judge(reference, prompts[:NUM_PROMPTS], answers)
    for path in stack.log_paths.values():
        assert json.loads(last_lines(path, 1)[0])["message"] == "stopped"
    finished = [json.loads(line) for line in stack.log_paths["planner_svc"].read_text().splitlines()]
    assert [item["completion_tokens"] for item in finished if item["message"] == "request finished"] == [TOKENS] * 7


def test_cpu_attention_alone_is_told_to_stop(start, prompts, reference):
    """A rolling restart: its sequences are computed again elsewhere, and it is attached again once it is back."""
    stack = start(planner={"mode": "asymmetric"}, gpu={"kv_bytes": "64MiB"}, cpu_attn={"kv_bytes": "64MiB"})
    pid = stack.pids["cpu_attn_svc"]
    events: list[str] = []
    stack._children["cpu_attn_svc"]._on_event = events.append

    async def run() -> list[list[int]]:
        async with streams(stack, prompts[:NUM_PROMPTS]) as running:
            os.kill(pid, signal.SIGTERM)
            return await asyncio.gather(*running)

    judge(reference, prompts[:NUM_PROMPTS], asyncio.run(run()))
    until(lambda: stack.pids.get("cpu_attn_svc", pid) != pid)
    assert events == ["cpu_attn_svc exited with code 0; started again in 0.5 s"]
    until(lambda: stack.server_info().host_blocks > 0)
    assert executor_status(stack).cpu_attention_attached


def test_the_executor_alone_is_told_to_stop(start, prompts, reference):
    """Its requests wait until it is back, and go on; nothing that it had computed for them was lost in between."""
    stack = start(planner={"mode": "asymmetric"}, gpu={"kv_bytes": "64MiB"}, cpu_attn={"kv_bytes": "64MiB"})
    pid = stack.pids["gpu_svc"]
    events: list[str] = []
    stack._children["gpu_svc"]._on_event = events.append

    async def run() -> list[list[int]]:
        async with streams(stack, prompts[:NUM_PROMPTS]) as running:
            os.kill(pid, signal.SIGTERM)
            return await asyncio.gather(*running)

    judge(reference, prompts[:NUM_PROMPTS], asyncio.run(run()))
    until(lambda: stack.pids.get("gpu_svc", pid) != pid)
    assert events == ["gpu_svc exited with code 0; started again in 0.5 s"]
    assert "executor let go: the executor has been told to stop" in stack.log_paths["planner_svc"].read_text()
