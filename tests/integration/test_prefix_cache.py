"""Conversations that begin alike, on the real services: the same tokens with and without the prefix cache."""

from collections.abc import Callable
from itertools import takewhile

from support.reference import Reference, Verdict

from neoflex import Client
from neoflex.supervisor import LocalStack

ROUNDS, NEW_TOKENS = 3, 12


def ask(stack: LocalStack, prompts: list[list[int]], salt: str = "") -> tuple[list[list[int]], list[int]]:
    """Greedy tokens, and how many tokens of each prompt were found."""
    tokens, cached = [], []
    with Client(stack.address) as client:
        for prompt in prompts:
            answer = client.generate(
                token_ids=prompt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, cache_salt=salt
            )
            tokens.append(list(answer.token_ids))
            cached.append(answer.usage.cached_tokens)
    return tokens, cached


def conversation(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Each turn repeats all before it."""
    turns, said = [], prompts[-1][:200]
    for question, answer in zip(prompts, answers, strict=False):
        said = said + question
        turns.append(said)
        said = said + answer
    return turns


def test_a_conversation_is_computed_once(
    start: Callable[..., LocalStack], prompts: list[list[int]], reference: Reference
) -> None:
    turns = conversation(prompts[:ROUNDS], [[5, 6, 7]] * ROUNDS)
    stack = start(gpu={"kv_bytes": "64MiB"}, cpu_attn={"kv_bytes": "64MiB"})
    tokens, cached = ask(stack, turns)
    block_tokens = stack.server_info().block_tokens
    assert cached[0] == 0
    # What the turn before and its answer have in common with this one, in whole blocks.
    for number in range(1, ROUNDS):
        known = turns[number - 1] + tokens[number - 1]
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(turns[number], known, strict=False)))
        assert cached[number] == min(shared, len(turns[number]) - 1) // block_tokens * block_tokens
    again, found = ask(stack, turns)
    assert again == tokens
    assert found == [(len(turn) - 1) // block_tokens * block_tokens for turn in turns]
    assert ask(stack, turns[:1], salt="another tenant")[1] == [0]
    assert stack.server_info().counters.cached_tokens == sum(cached) + sum(found)
    verdict = Verdict()
    for turn, answer in zip(turns, tokens, strict=True):
        reference.judge(turn, answer, verdict, "turn")
    assert not verdict.mismatches, str(verdict)


def test_without_it_nothing_is_shared(start: Callable[..., LocalStack], prompts: list[list[int]]) -> None:
    stack = start(kv={"prefix_cache": False}, gpu={"kv_bytes": "64MiB"}, cpu_attn={"kv_bytes": "64MiB"})
    assert ask(stack, [prompts[-1][:200]] * 2)[1] == [0, 0]
