"""What telemetry costs: the same load on stacks that run side by side and take turns, round after round.

    off         nothing is told
    prometheus  each service's /metrics is scraped every five seconds
    otlp        every request and iteration traced, with metrics and logs, to a receiver on this machine
    otlp 0.1    the same, with a tenth of the requests traced

Requests come by HTTP, so that all services have a part. The receiver reads nothing of what it is sent: what a collector
does with it is not ours. A stack may export during another one's turn; the CPU time of its services, in all rounds,
has that too.

    python benchmarks/telemetry.py [--concurrency 8] [--tokens 32] [--rounds 20] [--publish]
"""

import argparse
import asyncio
import re
import statistics
import threading
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
from gateway import PROMPT_TOKENS, HttpFace, tokens_per_s
from real_stack import running
from results import Row, arguments, publish

from neoflex.supervisor import LocalStack

_SCRAPE_S = 5.0
SYSTEMS = ("off", "prometheus", "otlp", "otlp 0.1")


class _Sink(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the type stubs only
    """Takes every export; an empty answer means that all of it was accepted."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._take)

    def _take(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.num_bytes += len(request)
        return b""


@contextmanager
def collector() -> Iterator[tuple[str, _Sink]]:
    """Its endpoint, and what it was sent."""
    sink = _Sink()
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[sink])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", sink
    server.stop(None)


@contextmanager
def scraped(stack: LocalStack) -> Iterator[None]:
    """As Prometheus does it, meanwhile."""
    logs = [path.read_text() for path in stack.log_paths.values()]
    urls = [f"{stack.http_url}/metrics", *re.findall(r"metrics at (http\S+)", "".join(logs))]
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(_SCRAPE_S):
            for url in urls:
                urllib.request.urlopen(url).read()

    thread = threading.Thread(target=scrape)
    thread.start()
    yield
    ended.set()
    thread.join()


@dataclass(frozen=True)
class Figures:
    """Of one stack."""

    tokens_per_s: list[float]
    """By round."""
    cpu_s: float
    """Of all its services, in all rounds."""


async def in_turns(stacks: list[LocalStack], concurrency: int, num_tokens: int, rounds: int) -> list[Figures]:
    """After a round that does not count; each begins with another stack."""
    rates: list[list[float]] = [[] for _ in stacks]
    async with AsyncExitStack() as opened:
        faces = [await opened.enter_async_context(HttpFace(stack)) for stack in stacks]
        for face in faces:
            await tokens_per_s(face, concurrency, num_tokens)
        before_s = list(map(cpu_seconds, stacks))
        for number in range(rounds):
            for place in range(len(faces)):
                which = (number + place) % len(faces)
                rates[which].append(await tokens_per_s(faces[which], concurrency, num_tokens))
        used_s = [cpu_seconds(stack) - before for stack, before in zip(stacks, before_s, strict=True)]
    return list(map(Figures, rates, used_s))


def cpu_seconds(stack: LocalStack) -> float:
    """That its services have used so far."""
    times = [psutil.Process(pid).cpu_times() for pid in stack.pids.values()]
    return sum(time.user + time.system for time in times)


def measure(args: argparse.Namespace) -> tuple[list[Figures], int]:
    longest = PROMPT_TOKENS + args.tokens
    kv_tokens = args.concurrency * (longest + 16)
    with ExitStack() as opened:
        endpoint, sink = opened.enter_context(collector())
        otlp: dict[str, object] = {"otlp_endpoint": endpoint}
        options: list[dict[str, object]] = [{}, {}, otlp, {**otlp, "traces_sample_ratio": 0.1}]
        stacks = [
            opened.enter_context(
                running(
                    "gpu_only",
                    kv_tokens,
                    1.0,
                    longest,
                    "auto",
                    dtype="bf16",
                    gateway=True,
                    metrics=system == "prometheus",
                    telemetry=telemetry,
                )
            )
            for system, telemetry in zip(SYSTEMS, options, strict=True)
        ]
        opened.enter_context(scraped(stacks[1]))
        figures = asyncio.run(in_turns(stacks, args.concurrency, args.tokens, args.rounds))
    return figures, sink.num_bytes


def main() -> None:
    parser = arguments("The same load with and without telemetry.")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    figures, num_bytes = measure(args)
    off, *told = figures
    rows = []
    for system, one in zip(SYSTEMS[1:], told, strict=True):
        # Round by round, as the machine's own pace changes from one to the next.
        ratio = statistics.median(rate / other for rate, other in zip(one.tokens_per_s, off.tokens_per_s, strict=True))
        detail = f"{statistics.median(one.tokens_per_s):.0f} / {statistics.median(off.tokens_per_s):.0f} tokens/s"
        rows.append(Row(system, ratio, f"{system} / off, tokens/s", 0.98, detail=detail))
    for system, one in zip(SYSTEMS[1:], told, strict=True):
        detail = f"{one.cpu_s:.1f} / {off.cpu_s:.1f} s"
        rows.append(Row(f"{system}, CPU time", one.cpu_s / off.cpu_s, f"{system} / off", None, detail=detail))
    text = (
        f"smollm2-135m-instruct, {args.concurrency} streams of {args.tokens} tokens by HTTP; medians of {args.rounds} "
        f"rounds in turns. otlp: every request and iteration traced; 0.1: a tenth of the requests, and the iterations "
        f"with one of these; {num_bytes / 1e6:.1f} MB in all. CPU time: of all services of a stack, in all rounds."
    )
    publish("telemetry", "What telemetry costs", "make bench-telemetry", text, rows, args.publish)


if __name__ == "__main__":
    main()
