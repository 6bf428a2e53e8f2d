"""Requests of every kind, and those that a server refuses, for as long as one likes."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx2

from neoflex import AsyncClient, NeoflexError

_NUM_BATCH, _NUM_CHAT = 8, 3
_WORDS = ("the", "sea,", "a", "moon", "and", "boats", "that", "nobody", "had", "seen", "for", "years.", "Tell", "me")


async def send_traffic(address: str, http_url: str, duration_s: float, seed: int = 0) -> Counter[str]:
    """Class batch keeps the server full, class chat has targets; both are to exist. Returns how many ended how."""
    outcomes: Counter[str] = Counter()
    end_s = time.monotonic() + duration_s

    async def repeat(number: int, send: Callable[[random.Random], Awaitable[str]]) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end_s:
            outcomes[await send(rng)] += 1

    async with (
        AsyncClient(address, max_retries=0) as client,
        httpx2.AsyncClient(base_url=http_url, timeout=120) as http,
    ):
        senders: list[Callable[[random.Random], Awaitable[str]]] = [
            *[lambda rng: _batch(client, rng)] * _NUM_BATCH,
            *[lambda rng: _chat(client, rng)] * _NUM_CHAT,
            lambda rng: _long(client, rng),
            lambda rng: _over_http(http, rng),
            lambda rng: _mistake(client, http),
            lambda rng: _leave(client),
        ]
        await asyncio.gather(*(repeat(number, send) for number, send in enumerate(senders)))
    return outcomes


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


async def _batch(client: AsyncClient, rng: random.Random) -> str:
    prompt = _text(rng, rng.randint(60, 160))
    with contextlib.suppress(NeoflexError):
        await client.generate(prompt, max_tokens=rng.randint(24, 64), ignore_eos=True, service_class="batch")
        return "batch"
    return "batch refused"


async def _long(client: AsyncClient, rng: random.Random) -> str:
    """Larger than a GPU cache of 16 MiB: the host attends, whatever the planner thinks of it."""
    await client.generate(_text(rng, 900), max_tokens=48, ignore_eos=True, service_class="batch")
    return "batch"


async def _chat(client: AsyncClient, rng: random.Random) -> str:
    try:
        answer = await client.generate(_text(rng, 20), max_tokens=16, ignore_eos=True, service_class="chat")
    except NeoflexError as error:
        return f"chat {error.reason}"
    finally:
        await asyncio.sleep(rng.uniform(0.2, 0.8))
    return "chat in time" if answer.usage.targets_met else "chat late"


async def _over_http(http: httpx2.AsyncClient, rng: random.Random) -> str:
    body = {"messages": [{"role": "user", "content": _text(rng, 30)}], "max_tokens": 16}
    answer = await http.post("/v1/chat/completions", json=body, headers={"x-service-class": "batch"})
    return f"HTTP {answer.status_code}"


async def _mistake(client: AsyncClient, http: httpx2.AsyncClient) -> str:
    await asyncio.sleep(0.5)
    await http.get("/v1/models/none")
    try:
        await client.generate("Hello", max_tokens=10**6)
    except NeoflexError as error:
        return f"mistake {error.reason}"
    return "mistake accepted"


async def _leave(client: AsyncClient) -> str:
    await asyncio.sleep(0.3)
    stream = client.stream("Count to a thousand.", max_tokens=500, ignore_eos=True, service_class="batch")
    async for _ in stream:
        break
    await stream.aclose()
    return "left"
