"""What the HTTP gateway costs: the same load by gRPC and by HTTP, in turns, on one running stack.

    streams    concurrent streamed completions; tokens per second, and the gateway's own CPU time per token
    first      one request at a time: time to the first token
    tokenize   a call behind which there is next to no work, so that the hop itself shows

Both clients do as little as they can: the one counts messages, the other reads a socket and counts events.

    python benchmarks/gateway.py [--concurrency 16] [--tokens 64] [--rounds 5] [--publish]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc
import psutil
from real_stack import running
from results import Row, arguments, publish

from neoflex.supervisor import LocalStack
from neoflex.v1 import inference_pb2 as pb
from neoflex.v1.inference_pb2_grpc import InferenceServiceStub

PROMPT_TOKENS = 32
TOKENIZE_CALLS = 200


@dataclass(frozen=True)
class Answer:
    """Of one stream."""

    first_s: float
    num_tokens: int


class GrpcFace:
    """Straight to the planner."""

    def __init__(self, stack: LocalStack) -> None:
        self._address = stack.address

    async def __aenter__(self) -> "GrpcFace":
        self._channel = grpc.aio.insecure_channel(self._address)
        self._stub = InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def stream(self, prompt: list[int], num_tokens: int) -> Answer:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
        request.sampling.temperature = 0
        request.stopping.max_tokens = num_tokens
        request.stopping.ignore_eos = True
        start = time.perf_counter()
        first_s, count = 0.0, 0
        async for message in self._stub.GenerateStream(pb.GenerateStreamRequest(request=request)):
            if message.delta.token_ids:
                first_s = first_s or time.perf_counter() - start
                count += len(message.delta.token_ids)
        return Answer(first_s, count)

    async def tokenize(self, text: str) -> int:
        return len((await self._stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids)


class HttpFace:
    """Through the gateway, a connection for each call that runs."""

    def __init__(self, stack: LocalStack) -> None:
        assert stack.config.gateway is not None
        self._host, _, port = stack.config.gateway.listen.rpartition(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> "HttpFace":
        return self

    async def __aexit__(self, *_: object) -> None:
        for _reader, writer in self._idle:
            writer.close()

    async def stream(self, prompt: list[int], num_tokens: int) -> Answer:
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        reader, writer = await self._post("/v1/completions", body)
        await reader.readuntil(b"\r\n\r\n")
        first_s, usage = 0.0, b""
        async for line in reader:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - start
                usage = line
            elif line.startswith(b"data: [DONE]"):
                break
        await reader.readuntil(b"0\r\n\r\n")
        self._idle.append((reader, writer))
        return Answer(first_s, json.loads(usage[6:])["usage"]["completion_tokens"])

    async def tokenize(self, text: str) -> int:
        reader, writer = await self._post("/tokenize", {"prompt": text})
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(headers.partition(b"content-length: ")[2].split(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        self._idle.append((reader, writer))
        return int(answer["count"])

    async def _post(self, path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        pair = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(data)}\r\n\r\n"
        pair[1].write(head.encode() + data)
        return pair


Face = GrpcFace | HttpFace


async def tokens_per_s(face: Face, concurrency: int, num_tokens: int) -> float:
    prompts = [[100 + number] * PROMPT_TOKENS for number in range(concurrency)]
    start = time.perf_counter()
    answers = await asyncio.gather(*(face.stream(prompt, num_tokens) for prompt in prompts))
    took_s = time.perf_counter() - start
    total = sum(answer.num_tokens for answer in answers)
    assert total == concurrency * num_tokens, total
    return total / took_s


async def first_token_s(face: Face) -> float:
    return statistics.median([(await face.stream([7] * PROMPT_TOKENS, 2)).first_s for _ in range(5)])


async def call_s(face: Face) -> float:
    start = time.perf_counter()
    for _ in range(TOKENIZE_CALLS):
        await face.tokenize("The capital of France is")
    return (time.perf_counter() - start) / TOKENIZE_CALLS


async def in_turns(stack: LocalStack, rounds: int, measure: Callable[[Face], Awaitable[float]]) -> tuple[float, float]:
    """Medians by gRPC and by HTTP, after one round that does not count."""
    figures: tuple[list[float], list[float]] = ([], [])
    async with GrpcFace(stack) as own, HttpFace(stack) as http:
        for number in range(rounds + 1):
            pair = await measure(own), await measure(http)
            if number:
                figures[0].append(pair[0])
                figures[1].append(pair[1])
    return statistics.median(figures[0]), statistics.median(figures[1])


async def cpu_per_token_s(stack: LocalStack, concurrency: int, num_tokens: int) -> float:
    """The gateway's own, in all its threads."""
    process = psutil.Process(stack.pids["gateway_svc"])
    async with HttpFace(stack) as http:
        before = process.cpu_times()
        await tokens_per_s(http, concurrency, num_tokens)
        after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (concurrency * num_tokens)


async def measure_all(stack: LocalStack, args: argparse.Namespace) -> list[Row]:
    load = partial(tokens_per_s, concurrency=args.concurrency, num_tokens=args.tokens)
    own_rate, http_rate = await in_turns(stack, args.rounds, load)
    cpu_s = await cpu_per_token_s(stack, args.concurrency, args.tokens)
    own_first_s, http_first_s = await in_turns(stack, args.rounds, first_token_s)
    own_call_s, http_call_s = await in_turns(stack, args.rounds, call_s)
    return [
        Row(
            f"{args.concurrency} streams of {args.tokens} tokens",
            http_rate / own_rate,
            "HTTP / gRPC, tokens/s",
            0.9,
            detail=f"{http_rate:.0f} / {own_rate:.0f} tokens/s",
        ),
        Row(
            "the gateway's CPU time in it",
            cpu_s * http_rate,
            "busy cores",
            0.25,
            at_least=False,
            detail=f"{cpu_s * 1e6:.0f} µs a token",
        ),
        Row(
            "time to first token, alone",
            http_first_s / own_first_s,
            "HTTP / gRPC",
            1.2,
            at_least=False,
            detail=f"{http_first_s * 1e3:.2f} / {own_first_s * 1e3:.2f} ms",
        ),
        Row(
            "tokenize, one after another",
            http_call_s / own_call_s,
            "HTTP / gRPC",
            None,
            detail=f"{http_call_s * 1e6:.0f} / {own_call_s * 1e6:.0f} µs",
        ),
    ]


def main() -> None:
    parser = arguments("The same load by gRPC and by HTTP.")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    longest = PROMPT_TOKENS + args.tokens
    kv_tokens = args.concurrency * (longest + 16)
    with running("gpu_only", kv_tokens, 1.0, longest, "auto", gateway=True) as stack:
        rows = asyncio.run(measure_all(stack, args))
    text = f"smollm2-135m-instruct, prompts of {PROMPT_TOKENS} tokens; medians of {args.rounds} rounds in turns."
    publish("gateway", "HTTP beside gRPC", "make bench-gateway", text, rows, args.publish)


if __name__ == "__main__":
    main()
