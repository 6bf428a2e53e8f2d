"""Tokens per second and latency of the real stack, with transformers' `generate` beside it in the same run.

Systems take turns on the same prompts, round after round, so that a noisy machine is noisy for all:

    transformers  one static batch of all prompts, fp32, all cores
    gpu_only      all KV in the "GPU" cache, no CPU attention service, all cores to gpu_svc
    small_gpu     the same with a tenth of the KV: what does not fit waits; only where a tenth holds a request
    asymmetric    a tenth of the KV in the "GPU" cache, the rest on the host; one core each to gpu_svc and cpu_attn_svc

gpu_only runs once in each type of `--dtypes`, the other stacks in the first; transformers computes in fp32.

    python benchmarks/serve.py [--concurrency 1,8,32] [--rounds 3] [--dtypes fp32,auto] [--json FILE] [--publish]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from results import Row, arguments, machine_name, publish
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteriaList

from neoflex import AsyncClient
from neoflex.supervisor import LocalStack
from svc_common.config import parse
from svc_common.model.read_spec import read_spec
from svc_common.model.store import ModelFiles, resolve


@dataclass(frozen=True)
class Placement:
    """How a stack splits the KV that all requests need together."""

    mode: str
    gpu_share: float
    host_share: float


STACKS = {
    "gpu_only": Placement("gpu_only", 1.0, 0.0),
    "small_gpu": Placement("gpu_only", 0.1, 0.0),
    "asymmetric": Placement("asymmetric", 0.1, 1.2),
}


# Types whose KV takes half as much; "auto" may, and gets room for fp32.
HALF = ("bf16", "fp16")
# Output tokens per second of gpu_only over those of transformers, by concurrent requests.
TARGETS = {1: 1.7, 8: 2.2, 32: 1.8}


@dataclass(frozen=True)
class System:
    """A stack in one compute type."""

    stack: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.stack} {self.dtype}"


@dataclass(frozen=True)
class Round:
    """One system, one concurrency, one round. Seconds."""

    tokens_per_s: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    executor_busy: float | None = None
    """Share of the wall time the executor spent in iterations."""
    asymmetric_iterations: float | None = None
    """Share of iterations with attention on the CPU."""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of unsorted values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Transformers:
    """`generate` on one batch: the first token marks the end of the prefill."""

    def __init__(self, files: ModelFiles) -> None:
        gguf = {"gguf_file": files.gguf.name} if files.gguf else {}
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            files.directory, dtype=torch.float32, **gguf
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], num_tokens: int) -> Round:
        times: list[float] = []

        def note(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        batch = torch.tensor(prompts)
        start = time.perf_counter()
        # Called once per token, it serves as a clock.
        self.model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note]),
        )
        total = time.perf_counter() - start
        ttft = times[0] - start
        tpot = (times[-1] - times[0]) / (num_tokens - 1)
        return Round(len(prompts) * num_tokens / total, (ttft,) * len(prompts), (tpot,) * len(prompts))


@contextmanager
def running(placement: Placement, model: str, kv_bytes: int, dtype: str) -> Iterator[LocalStack]:
    """A running stack for requests that need `kv_bytes` of KV."""
    run_dir = Path(tempfile.mkdtemp(prefix="nfx-"))
    config = parse(
        {
            "model": {"source": model},
            "planner": {"listen": "127.0.0.1:0", "mode": placement.mode},
            "gpu": {"device": "cpu", "dtype": dtype, "kv_bytes": int(placement.gpu_share * kv_bytes)},
            "cpu_attn": {"kv_bytes": int(placement.host_share * kv_bytes)},
        },
        "benchmark",
    )
    local = LocalStack(config, run_dir)
    local.start()
    try:
        local.wait_ready(120)
        yield local
    finally:
        local.stop()


async def drive(local: LocalStack, prompts: list[list[int]], num_tokens: int) -> Round:
    """All prompts at once; each reads its own stream."""
    ttfts, tpots = [], []

    async def one(client: AsyncClient, prompt: list[int]) -> None:
        start = time.perf_counter()
        first = last = 0.0
        async for delta in client.stream(token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True):
            if delta.token_ids:
                last = time.perf_counter()
                first = first or last
        ttfts.append(first - start)
        tpots.append((last - first) / (num_tokens - 1))

    async with AsyncClient(local.address) as client:
        before = (await client.server_info()).counters
        start = time.perf_counter()
        await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        total = time.perf_counter() - start
        after = (await client.server_info()).counters
    asymmetric = after.asymmetric_iterations - before.asymmetric_iterations
    gpu_only = after.gpu_only_iterations - before.gpu_only_iterations
    return Round(
        len(prompts) * num_tokens / total,
        tuple(ttfts),
        tuple(tpots),
        (after.executor_busy_ns - before.executor_busy_ns) / 1e9 / total,
        asymmetric / max(1, asymmetric + gpu_only),
    )


def systems(dtypes: list[str], concurrency: int) -> list[System]:
    """What takes turns with transformers."""
    # Less than ten requests: a tenth of their KV would not hold one.
    names = [name for name in STACKS if STACKS[name].gpu_share + STACKS[name].host_share >= 1 or concurrency > 10]
    first = [System(name, dtypes[0]) for name in names]
    return first + [System("gpu_only", dtype) for dtype in dtypes[1:]]


def measure(args: argparse.Namespace) -> dict[int, dict[str, list[Round]]]:
    files = resolve(args.model)
    spec = read_spec(files)
    transformers = Transformers(files)
    generator = torch.Generator().manual_seed(0)
    results: dict[int, dict[str, list[Round]]] = {}
    for concurrency in args.concurrency:
        prompts = torch.randint(100, spec.vocab_size, (concurrency, args.prompt_tokens), generator=generator).tolist()
        kv_bytes = concurrency * (args.prompt_tokens + args.new_tokens + 16) * spec.kv_bytes_per_token(4)
        wanted = systems(args.dtypes, concurrency)
        rounds: dict[str, list[Round]] = {name: [] for name in ("transformers", *map(str, wanted))}
        with ExitStack() as running_stacks:
            stacks = {
                str(system): running_stacks.enter_context(
                    running(
                        STACKS[system.stack], args.model, kv_bytes // (2 if system.dtype in HALF else 1), system.dtype
                    )
                )
                for system in wanted
            }
            for stack in stacks.values():  # warm up
                asyncio.run(drive(stack, [prompt[:8] for prompt in prompts], 4))
            for _ in range(args.rounds):
                rounds["transformers"].append(transformers.run(prompts, args.new_tokens))
                for name, stack in stacks.items():
                    rounds[name].append(asyncio.run(drive(stack, prompts, args.new_tokens)))
        results[concurrency] = rounds
    return results


@dataclass(frozen=True)
class Summary:
    """Medians over rounds; latencies over all requests of all rounds. Seconds."""

    ratio: float
    """Tokens per second over those of transformers."""
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    executor_busy: float | None
    asymmetric_iterations: float | None

    @classmethod
    def of(cls, rounds: list[Round], baseline: float) -> "Summary":
        ttft = [value for r in rounds for value in r.ttft_s]
        tpot = [value for r in rounds for value in r.tpot_s]
        rate = statistics.median(r.tokens_per_s for r in rounds)
        busy = [r.executor_busy for r in rounds if r.executor_busy is not None]
        asymmetric = [r.asymmetric_iterations for r in rounds if r.asymmetric_iterations is not None]
        return cls(
            rate / baseline,
            rate,
            percentile(ttft, 0.5),
            percentile(ttft, 0.95),
            percentile(tpot, 0.5),
            percentile(tpot, 0.95),
            statistics.median(busy) if busy else None,
            statistics.median(asymmetric) if asymmetric else None,
        )

    def cells(self) -> list[str]:
        shares = ("" if share is None else f"{share:.0%}" for share in (self.executor_busy, self.asymmetric_iterations))
        return [
            f"{self.ratio:.2f}",
            f"{self.tokens_per_s:.1f}",
            f"{self.ttft_p50_s:.2f} / {self.ttft_p95_s:.2f}",
            f"{1e3 * self.tpot_p50_s:.0f} / {1e3 * self.tpot_p95_s:.0f}",
            *shares,
        ]


COLUMNS = (
    "requests",
    "system",
    "x transformers",
    "tokens/s",
    "TTFT p50 / p95, s",
    "TPOT p50 / p95, ms",
    "executor busy",
    "iterations with CPU attention",
)


def report(results: dict[int, dict[str, list[Round]]], args: argparse.Namespace) -> dict[str, Summary]:
    """Prints a Markdown table; returns its rows."""
    console = Console(width=160)
    console.print(f"{about(args)}; {machine_name()}")
    table = Table(box=box.MARKDOWN)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "system" else "right")
    summaries: dict[str, Summary] = {}
    for concurrency, rounds in results.items():
        baseline = statistics.median(r.tokens_per_s for r in rounds["transformers"])
        for system, of_system in rounds.items():
            summary = summaries[f"{system}@{concurrency}"] = Summary.of(of_system, baseline)
            table.add_row(str(concurrency), system, *summary.cells())
    console.print(table)
    return summaries


def about(args: argparse.Namespace) -> str:
    return f"{args.model}, {args.prompt_tokens} random tokens in, {args.new_tokens} out, all requests at once"


def rows(summaries: dict[str, Summary], args: argparse.Namespace) -> list[Row]:
    """gpu_only in each type beside transformers in fp32."""
    return [
        Row(
            f"{concurrency} concurrent, {dtype}",
            ours.ratio,
            "gpu_only / transformers fp32, output tokens/s",
            TARGETS.get(concurrency),
            detail=f"{ours.tokens_per_s:.1f} / {summaries[f'transformers@{concurrency}'].tokens_per_s:.1f} tokens/s",
        )
        for concurrency in args.concurrency
        for dtype in args.dtypes
        for ours in (summaries[f"{System('gpu_only', dtype)}@{concurrency}"],)
    ]


def main() -> None:
    parser = arguments("Throughput and latency beside transformers, in one run.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["fp32", "auto"], help="of the stacks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = measure(args)
    summaries = report(results, args)
    if args.json:
        raw = {str(n): {s: [asdict(r) for r in rs] for s, rs in rounds.items()} for n, rounds in results.items()}
        args.json.write_text(
            json.dumps(
                {
                    "machine": machine_name(),
                    "summary": {key: asdict(value) for key, value in summaries.items()},
                    "rounds": raw,
                },
                indent=1,
            )
        )
    text = f"{about(args)}; medians of {args.rounds} rounds in which the systems take turns. Real services, device cpu."
    publish("serve", "Serving beside transformers", "make bench-serve", text, rows(summaries, args), args.publish)


if __name__ == "__main__":
    main()
