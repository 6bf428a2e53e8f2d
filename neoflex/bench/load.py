"""Sends a workload: at its own times whatever becomes of it, or by so many clients that each wait for their answer."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neoflex.bench.record import Record
from neoflex.bench.targets import Target
from svc_common.workloads import Arrival

Progress = Callable[[], None]
"""Called for each request that has ended."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a workload."""

    records: list[Record]
    duration_s: float
    """From the first request to the last answer."""


async def send_at_times(target: Target, arrivals: Sequence[Arrival], seed: int, done: Progress) -> Sent:
    """Each request when it arrives, however many are under way."""
    clock = asyncio.get_running_loop().time
    prompts = _prompts(target, arrivals, seed)
    start_s = clock()

    async def one(arrival: Arrival, prompt: list[int]) -> Record:
        record = Record(start_s + arrival.at_s, arrival.prompt_tokens)
        await asyncio.sleep(max(0.0, record.due_s - clock()))
        await target.run(prompt, arrival, record)
        done()
        return record

    records = await asyncio.gather(*(one(*both) for both in zip(arrivals, prompts, strict=True)))
    return Sent(records, clock() - start_s)


async def send_in_turn(
    target: Target, arrivals: Sequence[Arrival], concurrency: int, seed: int, done: Progress
) -> Sent:
    """By `concurrency` clients, each with one request under way. Times of arrival don't count."""
    clock = asyncio.get_running_loop().time
    waiting = iter([*zip(arrivals, _prompts(target, arrivals, seed), strict=True)])
    records: list[Record] = []
    start_s = clock()

    async def client() -> None:
        for arrival, prompt in waiting:
            record = Record(clock(), arrival.prompt_tokens)
            await target.run(prompt, arrival, record)
            records.append(record)
            done()

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(arrivals)))))
    return Sent(records, clock() - start_s)


def _prompts(target: Target, arrivals: Sequence[Arrival], seed: int) -> list[list[int]]:
    """Random ids; beyond the lowest, among which special tokens lie."""
    draw = random.Random(seed)
    lowest = min(256, target.vocabulary_size // 2)
    return [[draw.randrange(lowest, target.vocabulary_size) for _ in range(item.prompt_tokens)] for item in arrivals]
