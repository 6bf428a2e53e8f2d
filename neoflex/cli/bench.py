"""`neoflex bench`: a workload sent to a running server, and how it was served."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from neoflex.bench.load import Progress as Done
from neoflex.bench.load import Sent, send_at_times, send_in_turn
from neoflex.bench.summary import Percentiles, Summary, Targets, summarize
from neoflex.bench.targets import GrpcTarget, HttpTarget, Target, TargetError
from neoflex.channel import DEFAULT_ADDRESS
from neoflex.cli.arguments import (
    ApiKeyFile,
    CaFile,
    CertificateFile,
    KeyFile,
    ServerAddress,
    ServerName,
    UseTls,
    access_of,
)
from neoflex.cli.output import err, fail
from neoflex.cli.tables import print_table
from svc_common import workloads
from svc_common.wording import counted
from svc_common.workloads import Arrival, InputError, Workload, at_rate

_DEFAULT_WORKLOAD = "poisson:requests=64,prompt=32-256,output=16-64"
_DEFAULT_CONCURRENCY = "8"
_MOST_CONCURRENT = 4096
_MOST_RATE = 1e6
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Level:
    """How hard one run pushes: by a rate, or by a number of clients."""

    value: float
    is_rate: bool

    @property
    def title(self) -> str:
        if not self.is_rate:
            return f"{self.value:g} concurrent"
        unit = "request/s" if self.value == 1 else "requests/s"
        return f"{self.value:.3g} {unit}" if self.value else "all at once"


def bench(
    address: ServerAddress = DEFAULT_ADDRESS,
    http: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI-compatible server instead: http://HOST:PORT/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for, with --http; default: the first listed.")] = None,
    workload: Annotated[
        str, typer.Option(metavar="W", help="Recorded trace, or e.g. poisson:prompt=500,output=50; see simulate.")
    ] = _DEFAULT_WORKLOAD,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N[,N]", help=f"Clients that wait for their answers; {_DEFAULT_CONCURRENCY} by default."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="R[,R]", help="Requests per second instead; 2x: twice the recorded rate; 0: at once."),
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before those that count.")] = 2,
    ttft: Annotated[float | None, typer.Option(min=0, help="Target in seconds; with --tpot goodput is shown.")] = None,
    tpot: Annotated[float | None, typer.Option(min=0, help="Target in seconds per token.")] = None,
    service_class: Annotated[
        str | None, typer.Option("--class", help="Service class of requests whose workload names none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    tls: UseTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
    api_key_file: ApiKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each run.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw latency and throughput against the load.")] = None,
) -> None:
    """Measure a running server: latency, throughput and goodput under a load."""
    if (ttft is None) != (tpot is None):
        raise typer.BadParameter("--ttft and --tpot need each other")
    targets = None if ttft is None or tpot is None else Targets(ttft, tpot)
    try:
        load = workloads.read(workload, requests)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    levels = _levels(rate, concurrency, load)

    access = access_of(tls, ca_file, certificate_file, key_file, server_name, api_key_file)

    def make_target() -> GrpcTarget | HttpTarget:
        if http is None:
            return GrpcTarget(address, service_class, access)
        return HttpTarget(http, model, access.api_key or os.environ.get("OPENAI_API_KEY"), service_class, access.tls)

    try:
        runs = asyncio.run(_measure(make_target, load, levels, warm_up, targets, seed, as_json))
    except TargetError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    if not as_json:
        print_table(_table(runs))
        for run in runs:
            for text, count in run.errors.items():
                err.print(f"{run.load}: {counted(count, 'request')}: {text}", style="yellow", markup=False)
    if png is not None:
        from neoflex.bench.picture import draw  # matplotlib takes a second to import.

        unit = "requests/s that arrive" if levels[0].is_rate else "concurrent requests"
        draw(
            [run for run in runs if run.num_finished],
            f"{counted(len(load.arrivals), 'request')} of {load.name}",
            unit,
            png,
        )
        err.print(f"{png}: latency against load", markup=False, soft_wrap=True)
    if not any(run.num_finished for run in runs):
        fail("no request was answered")


def _levels(rate: str | None, concurrency: str | None, load: Workload) -> list[Level]:
    """Raises typer.BadParameter."""
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("give either --rate or --concurrency")
    if rate is not None:
        return [Level(_rate(text, load), True) for text in rate.split(",")]
    return [Level(_concurrency(text), False) for text in (concurrency or _DEFAULT_CONCURRENCY).split(",")]


def _rate(text: str, load: Workload) -> float:
    relative = text.endswith("x")
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        raise typer.BadParameter(f"must be a number or NUMBERx, is {text!r}", param_hint="--rate") from None
    if relative and load.own_rate is None:
        raise typer.BadParameter(f"{text}: the workload has no recorded times", param_hint="--rate")
    value *= load.own_rate if relative and load.own_rate else 1.0
    if not 0 <= value <= _MOST_RATE:
        raise typer.BadParameter(f"must be from 0 to {_MOST_RATE:g}, is {text}", param_hint="--rate")
    return value


def _concurrency(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_CONCURRENT:
        raise typer.BadParameter(f"must be from 1 to {_MOST_CONCURRENT}, is {text!r}", param_hint="--concurrency")
    return int(text)


async def _measure(
    make_target: Callable[[], GrpcTarget | HttpTarget],
    load: Workload,
    levels: Sequence[Level],
    warm_up: int,
    targets: Targets | None,
    seed: int,
    as_json: bool,
) -> list[Summary]:
    runs: list[Summary] = []
    target = make_target()  # Within the loop that it belongs to.
    try:
        await target.connect()
        with _progress() as bar:
            if warm_up:
                await _send(target, load.arrivals[:warm_up], Level(1, False), seed, bar, "warm-up")
            for number, level in enumerate(levels, 1):
                # Prompts differ from run to run: none is answered from a cache that another filled.
                sent = await _send(target, load.arrivals, level, seed + number, bar, level.title)
                runs.append(summarize(sent, level.title, level.value, targets))
                if as_json:
                    print(json.dumps(runs[-1].to_json()), flush=True)
    finally:
        await target.aclose()
    return runs


async def _send(
    target: Target, arrivals: Sequence[Arrival], level: Level, seed: int, bar: Progress, title: str
) -> Sent:
    task = bar.add_task(title, total=len(arrivals))

    def done() -> None:
        bar.advance(task)

    advance: Done = done
    if level.is_rate:
        return await send_at_times(target, at_rate(arrivals, level.value), seed, advance)
    return await send_in_turn(target, arrivals, int(level.value), seed, advance)


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        yield bar


def _table(runs: Sequence[Summary]) -> Table:
    table = Table("load", "finished", title="latencies in ms: p50 / p95 / p99", title_justify="left")
    for name in ("requests/s", "tokens/s out", "TTFT", "TPOT", "inter-token", "end to end"):
        table.add_column(name, justify="right")
    has_targets = any(run.in_time is not None for run in runs)
    if has_targets:
        table.add_column("in time", justify="right")
        table.add_column("goodput/s", justify="right")
    for run in runs:
        row = [
            run.load,
            f"{run.num_finished} of {run.num_requests}",
            f"{run.requests_per_s:.2f}",
            f"{run.output_tokens_per_s:.1f}",
            *(_milliseconds(part) for part in (run.ttft, run.tpot, run.inter_token, run.end_to_end)),
        ]
        if has_targets:
            row += [f"{run.in_time or 0:.1%}", f"{run.goodput_per_s or 0:.2f}"]
        table.add_row(*row)
    return table


def _milliseconds(found: Percentiles | None) -> str:
    return "-" if found is None else " / ".join(f"{value * 1e3:.4g}" for value in (found.p50, found.p95, found.p99))
