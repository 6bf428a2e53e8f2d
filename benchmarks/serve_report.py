"""What serve.py measured, as a table of all systems and as rows with targets."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from results import Row, machine_name
from rich import box
from rich.console import Console
from rich.table import Table

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
    cpu_iterations: float | None = None
    """Share of iterations with attention on the CPU."""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of unsorted values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


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
    cpu_iterations: float | None

    @classmethod
    def of(cls, rounds: list[Round], baseline: float) -> "Summary":
        ttft = [value for r in rounds for value in r.ttft_s]
        tpot = [value for r in rounds for value in r.tpot_s]
        rate = statistics.median(r.tokens_per_s for r in rounds)
        busy = [r.executor_busy for r in rounds if r.executor_busy is not None]
        with_cpu = [r.cpu_iterations for r in rounds if r.cpu_iterations is not None]
        return cls(
            rate / baseline,
            rate,
            percentile(ttft, 0.5),
            percentile(ttft, 0.95),
            percentile(tpot, 0.5),
            percentile(tpot, 0.95),
            statistics.median(busy) if busy else None,
            statistics.median(with_cpu) if with_cpu else None,
        )

    def cells(self) -> list[str]:
        shares = ("" if share is None else f"{share:.0%}" for share in (self.executor_busy, self.cpu_iterations))
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
