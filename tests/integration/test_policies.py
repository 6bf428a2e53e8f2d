"""Whichever processor computes which layers, and whatever dies meanwhile: the tokens are transformers' greedy ones."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence

import pytest
from support.executor import cpu_attention_status
from support.policy_pairs import NUM_TOKENS, policy_pairs, serve_under_every_pair
from support.processes import shared_bytes
from support.reference import Reference, Verdict
from support.steering import SteeredStack, steered_stack

from neoflex import AsyncClient, Completion

NUM_LAYERS = 30
LAYER_BYTES = 14_160_384
"""Of the default model in fp32."""
# Small enough that of six sequences some decode on the host, in layers of the GPU as well.
TIERS: dict[str, dict[str, object]] = {"gpu": {"kv_bytes": "6MiB"}, "cpu_attn": {"kv_bytes": "64MiB"}}
LIMITS: dict[str, object] = {"max_batch_tokens": 64, "max_sequence_tokens": 512}  # Few points to measure at the start.


@pytest.fixture(scope="module")
def steered() -> Iterator[SteeredStack]:
    with steered_stack(planner=LIMITS, **TIERS) as stack:
        yield stack


def test_tokens_under_every_pair_of_policies_and_each_change(steered, reference, prompts):
    verdict = serve_under_every_pair(steered, NUM_LAYERS, reference, prompts[:5])
    assert verdict.mismatches == []


def test_a_partition_attends_on_the_cpu_in_the_layers_of_the_gpu_too(steered, reference, prompts):
    """NEO's offloaded attention above FlexInfer's CPU layers; and weights that both processes compute with lie once."""
    policy = policy_pairs(NUM_LAYERS)["resident", "partition"]
    steered.ask(policy)
    steered.until_runs(policy)
    before = steered.stack.server_info().counters.cpu_attended_tokens
    judge(asyncio.run(generate(steered, prompts[:6])), prompts[:6], reference)
    assert steered.stack.server_info().counters.cpu_attended_tokens > before
    # The executor has taken the layers into its own memory, which is the device's; streaming them it maps the file.
    policy = policy_pairs(NUM_LAYERS)["offload", "partition"]
    steered.ask(policy)
    steered.until_runs(policy)
    judge(asyncio.run(generate(steered, prompts[:6])), prompts[:6], reference)
    held = {name: shared_bytes(steered.stack.pids[name], ".weights") for name in ("gpu_svc", "cpu_attn_svc")}
    in_both = policy.decode_cpu_layers * LAYER_BYTES
    for sizes in held.values():
        assert sizes.anonymous == 0
        assert sizes.resident >= in_both
    whole = max(sizes.resident for sizes in held.values())
    assert sum(sizes.proportional for sizes in held.values()) <= 1.01 * whole


@pytest.mark.parametrize("kinds", [("offload", "partition"), ("cpu_only", "cpu_only")])
def test_the_cpu_layers_service_is_killed_with_streams_in_flight(kinds, steered, reference, prompts):
    policy = policy_pairs(NUM_LAYERS)[kinds]
    steered.ask(policy)
    steered.until_runs(policy)
    killed = steered.stack.pids["cpu_attn_svc"]
    answers = asyncio.run(generate(steered, prompts[:4], kill=killed))
    judge(answers, prompts[:4], reference)
    assert max(answer.usage.recomputations for answer in answers) > 0
    # Attached again, the layers are the new process's, which computes them.
    steered.until_runs(policy)
    assert steered.stack.pids["cpu_attn_svc"] != killed
    judge(asyncio.run(generate(steered, prompts[:4])), prompts[:4], reference)
    assert cpu_attention_status(steered.stack).iterations >= NUM_TOKENS - 1


async def generate(
    steered: SteeredStack, prompts: Sequence[Sequence[int]], kill: int | None = None
) -> list[Completion]:
    """All at once; a process is killed when the first has a token."""
    async with AsyncClient(steered.stack.address) as client:
        options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "timeout": 300}
        requests = [asyncio.create_task(client.generate(token_ids=prompt, **options)) for prompt in prompts]
        if kill is not None:
            async for _ in client.stream(token_ids=prompts[0], **options | {"max_tokens": 4}):
                pass
            os.kill(kill, signal.SIGKILL)
        return await asyncio.gather(*requests)


def judge(answers: Sequence[Completion], prompts: Sequence[Sequence[int]], reference: Reference) -> None:
    verdict = Verdict()
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.token_ids) == NUM_TOKENS
        reference.judge(prompt, answer.token_ids, verdict, f"request {number}")
    assert verdict.mismatches == [], str(verdict)
