"""Serves under every pair of policies of prefill and decode, each change of policy in mid-stream."""

import asyncio
from collections.abc import Sequence

from neoflex import AsyncClient
from support.reference import Reference, Verdict
from support.steering import SteeredStack
from svc_common.policy import ExecutionPolicy

NUM_TOKENS = 20
_TOKENS_BEFORE_CHANGE = 4


def policy_pairs(num_layers: int) -> dict[tuple[str, str], ExecutionPolicy]:
    """By kinds of (prefill, decode): all there can be, where a prompt's CPU layers are the decodes', too, or fewer."""
    third = num_layers // 3
    policies = (
        ExecutionPolicy(num_layers),
        ExecutionPolicy(third),
        ExecutionPolicy(num_layers, 0, third),
        ExecutionPolicy(third, 0, third),
        ExecutionPolicy(third, third, third),
        ExecutionPolicy(num_layers, 0, num_layers),
        ExecutionPolicy(third, 0, num_layers),
        ExecutionPolicy(third, third, num_layers),
        ExecutionPolicy(0, num_layers, num_layers),
    )
    pairs = {}
    for policy in policies:
        layers = policy.prefill_cpu_layers, policy.decode_cpu_layers
        prefill, decode = (policy.kind(cpu_layers, num_layers).value for cpu_layers in layers)
        pairs[prefill, decode] = policy
    assert len(pairs) == len(policies)
    return pairs


async def _read(client: AsyncClient, prompt: Sequence[int], tokens: list[int], running: asyncio.Event) -> None:
    stream = client.stream(token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=300)
    async for delta in stream:
        tokens += delta.token_ids
        if len(tokens) >= _TOKENS_BEFORE_CHANGE:
            running.set()


async def _through_change(steered: SteeredStack, policy: ExecutionPolicy, prompts: Sequence[Sequence[int]]) -> list:
    """The tokens of requests that begin under the present policy and go on under `policy`."""
    async with AsyncClient(steered.stack.address) as client:
        answers: list[list[int]] = [[] for _ in prompts]
        running = [asyncio.Event() for _ in prompts]
        async with asyncio.TaskGroup() as group:
            for prompt, tokens, event in zip(prompts, answers, running, strict=True):
                group.create_task(_read(client, prompt, tokens, event))
            await running[-1].wait()
            steered.ask(policy)
    return answers


def serve_under_every_pair(
    steered: SteeredStack, num_layers: int, reference: Reference, prompts: Sequence[Sequence[int]]
) -> Verdict:
    """All tokens judged. Begins and ends with the last pair."""
    verdict = Verdict()
    order = list(policy_pairs(num_layers).values())
    steered.ask(order[-1])
    steered.until_runs(order[-1])
    for before, after in zip([order[-1], *order], [*order, order[-1]], strict=False):
        if before == after:
            continue
        num_before = steered.stack.server_info().counters.recomputed_tokens
        answers = asyncio.run(_through_change(steered, after, prompts))
        steered.until_runs(after)
        assert steered.stack.server_info().counters.recomputed_tokens > num_before, f"{after} came after all answers"
        for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
            assert len(tokens) == NUM_TOKENS
            reference.judge(prompt, tokens, verdict, f"request {number} from {before} to {after}")
    print(f"\n{verdict}")
    return verdict
