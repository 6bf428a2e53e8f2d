"""Services are killed amid answers of every kind: each goes on, and is what it would have been."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from support.blocks import blocks_held
from support.processes import private_bytes
from support.schemas import SCHEMAS

from neoflex import AsyncClient, Client, FinishReason, NeoflexError
from neoflex.generation import PositionLogprobs
from neoflex.processes import RestartPolicy
from neoflex.supervisor import LocalStack

NUM_TOKENS = 96
# Room for some of them on the GPU, the others go to the host; few points to measure at each start of gpu_svc.
STACK: dict[str, dict[str, object]] = {
    "planner": {"max_batch_tokens": 64, "max_sequence_tokens": 512},
    "gpu": {"kv_bytes": 14 * 737_280},
    "cpu_attn": {"kv_bytes": "64MiB"},
}
QUICK = RestartPolicy(max_restarts=20, first_backoff_s=0.05, max_backoff_s=0.05)


@dataclass
class Answer:
    """What a stream brought, in one piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    recomputations: int = 0


def requests_of(prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """One of each kind: what goes on depends on the tokens, on the draw's number, on counts, on a grammar."""
    by_length = sorted(prompts[:-1], key=len)
    plain = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {
        "greedy": {"token_ids": by_length[0], "temperature": 0.0, **plain},
        "drawn": {"token_ids": by_length[1], "seed": 7, "top_p": 0.9, **plain},
        "penalties": {"token_ids": by_length[2], "seed": 8, "presence_penalty": 0.7, "frequency_penalty": 0.3, **plain},
        "log-probabilities": {
            "token_ids": by_length[3],
            "temperature": 0.0,
            "logprobs": 2,
            "prompt_logprobs": 1,
            **plain,
        },
        "structured": {
            "text": "Describe one thing, in the form that you were told.",
            "seed": 3,
            "max_tokens": 300,
            "json_schema": SCHEMAS["nested"],
        },
    }


async def ask(client: AsyncClient, options: dict[str, Any], answer: Answer) -> None:
    options = dict(options)
    text = (options.pop("text"),) if "text" in options else ()
    stream = client.stream(*text, timeout=200, **options)
    async for delta in stream:
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs
        answer.prompt_logprobs += delta.prompt_logprobs
    assert stream.finish is not None
    assert stream.usage is not None
    answer.reason, answer.recomputations = stream.finish.reason, stream.usage.recomputations


async def until(holds: Callable[[], bool]) -> None:
    """Polls; the test's own time limit is the only one."""
    while True:
        if holds():
            return
        await asyncio.sleep(0.005)


def serve(
    stack: LocalStack,
    requests: dict[str, dict[str, Any]],
    disturb: Callable[[], Awaitable[None]] | None = None,
    num_before: int = 6,
) -> dict[str, Answer]:
    """All at once; `disturb` when each has its first tokens."""

    async def run() -> dict[str, Answer]:
        answers = {name: Answer() for name in requests}
        async with AsyncClient(stack.address, max_retries=0) as client, asyncio.TaskGroup() as group:
            for name, options in requests.items():
                group.create_task(ask(client, options, answers[name]))
            if disturb:
                await until(lambda: min(len(answer.token_ids) for answer in answers.values()) >= num_before)
                assert all(answer.reason is None for answer in answers.values())
                await disturb()
        return answers

    return asyncio.run(run())


def assert_same(answers: dict[str, Answer], undisturbed: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        expected = undisturbed[name]
        assert answer.token_ids == expected.token_ids, name
        assert (answer.text, answer.reason) == (expected.text, expected.reason), name
        for got, want in (
            (answer.logprobs, expected.logprobs),
            (answer.prompt_logprobs, expected.prompt_logprobs),
        ):
            assert [p.chosen.token_id for p in got] == [p.chosen.token_id for p in want], name
            assert [p.chosen.logprob for p in got] == pytest.approx([p.chosen.logprob for p in want], abs=2e-3), name


def kill(stack: LocalStack, *names: str) -> None:
    for name in names:
        os.kill(stack.pids[name], signal.SIGKILL)


def test_answers_of_every_kind_go_on(start, prompts):
    stack = start(policy=QUICK, **STACK)
    requests = requests_of(prompts)
    undisturbed = serve(stack, requests)
    assert len(undisturbed["log-probabilities"].logprobs) == NUM_TOKENS
    jsonschema.validate(json.loads(undisturbed["structured"].text), SCHEMAS["nested"])

    async def kill_gpu() -> None:
        kill(stack, "gpu_svc")

    async def kill_both() -> None:
        kill(stack, "gpu_svc", "cpu_attn_svc")

    async def kill_twice() -> None:
        """The second time while the new one loads the model."""
        first = stack.pids["gpu_svc"]
        kill(stack, "gpu_svc")
        await until(lambda: stack.pids.get("gpu_svc", first) != first)
        kill(stack, "gpu_svc")

    for num_losses, disturb in enumerate((kill_gpu, kill_both, kill_twice), 1):
        answers = serve(stack, requests, disturb)
        assert_same(answers, undisturbed)
        assert all(answer.recomputations >= 1 for answer in answers.values())
        counters = stack.server_info().counters
        assert counters.executor_losses == num_losses
        assert counters.recomputed_tokens > 0
        deadline = time.monotonic() + 30
        while any(blocks_held(stack)):
            assert time.monotonic() < deadline, blocks_held(stack)
            time.sleep(0.02)


def test_a_planner_that_is_killed_leaves_nothing_behind(start, prompts):
    """Its callers are told; the workers are as empty, and as small, as they were."""
    stack = start(policy=QUICK, **STACK)
    requests = requests_of(prompts)
    undisturbed = serve(stack, requests)
    workers = ("gpu_svc", "cpu_attn_svc")
    pids = {name: stack.pids[name] for name in workers}
    held: list[int] = []
    for _ in range(3):

        async def run() -> list[str]:
            async with AsyncClient(stack.address, max_retries=0) as client:
                answers = [Answer() for _ in requests]
                tasks = [
                    asyncio.create_task(ask(client, options, answer))
                    for options, answer in zip(requests.values(), answers, strict=True)
                ]
                await until(lambda: all(answer.token_ids for answer in answers))
                kill(stack, "planner_svc")
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
                return [outcome.code for outcome in outcomes if isinstance(outcome, NeoflexError)]

        assert asyncio.run(run()) == ["UNAVAILABLE"] * len(requests)
        with Client(stack.address) as client:
            client.wait_until_ready(60)
        assert not any(blocks_held(stack))
        assert_same(serve(stack, requests), undisturbed)
        held.append(sum(private_bytes(pids[name]) for name in workers))
    assert {name: stack.pids[name] for name in workers} == pids
    # Allocators keep more or less from round to round; what leaks is added in each.
    assert min(later - earlier for earlier, later in pairwise(held)) <= 2 * 2**20
