"""`neoflex trace`: where the time of a server's iterations goes, in both processes, now."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from neoflex.access import Access
from neoflex.channel import DEFAULT_ADDRESS
from neoflex.cli.arguments import (
    ApiKeyFile,
    CaFile,
    CertificateFile,
    KeyFile,
    ServerName,
    UseTls,
    access_of,
    check_address,
    connect,
)
from neoflex.cli.output import err, explain_device, fail, out, starting
from neoflex.cli.own_stack import own_stack_config
from neoflex.client import Client
from neoflex.supervisor import LocalStack
from neoflex.trace.chrome import to_chrome
from neoflex.trace.record import record
from neoflex.trace.summary import IterationTimes, Summary, summarize, times_of

_DEFAULT_S = 2.0
_LONGEST_S = 60.0
"""For a number of iterations, from a server that turns out to have none."""
_LOAD_REQUESTS = 12
_LOAD_PROMPT = "Go on with this story. " + 40 * "The keeper lit the lamp and looked out at the sea. "
"""Some 500 tokens, so that attention has something to do."""
_LOAD_TOKENS = 256
_WARM_TOKENS = 10
"""Of each request, before the recording begins."""
_POLL_S = 0.1

_ADDRESS = typer.Option(
    help="Server, host:port or unix:path.",
    callback=check_address,
    show_default=f"{DEFAULT_ADDRESS} if one listens there, else one of its own",
)
_SECONDS = typer.Option(min=0.01, max=3600, help="How long to record.", show_default=f"{_DEFAULT_S:g}")


def trace(
    address: Annotated[str | None, _ADDRESS] = None,
    seconds: Annotated[float | None, _SECONDS] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Record so many and no more.")] = None,
    output: Annotated[Path, typer.Option(help="JSON for ui.perfetto.dev or chrome://tracing.")] = Path("trace.json"),
    png: Annotated[Path | None, typer.Option(help="Also draw a timeline.")] = None,
    tls: UseTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Record what both processes do when; without a server, start one and give it work."""
    _check_writable(output, "--output")
    if png is not None:
        _check_writable(png, "--png")
    limit_s = seconds or (_DEFAULT_S if iterations is None else _LONGEST_S)
    access = access_of(tls, ca_file, certificate_file, key_file, server_name, api_key_file)
    with _server(address, access) as (server, access):
        how_long = f"{limit_s:g} s" if iterations is None else f"at most {limit_s:g} s, {iterations} iterations,"
        err.print(f"recording {how_long} at {server}", markup=False)
        traces = record(server, limit_s, iterations, access)
    if not traces:
        fail(f"no iteration ran at {server} within {limit_s:g} s: trace it while it has requests")
    summary = summarize(traces)
    output.write_text(json.dumps(to_chrome(traces)))
    err.print(f"{output}: open it at https://ui.perfetto.dev", markup=False, soft_wrap=True)
    if png is not None:
        from neoflex.trace.picture import draw  # matplotlib takes a second to import.

        draw(traces, summary, png)
        err.print(f"{png}: the timeline", markup=False, soft_wrap=True)
    out.print(_table(summary))


def _check_writable(path: Path, option: str) -> None:
    """Before anything is recorded."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}", param_hint=option) from error
    if not existed:
        path.unlink()


@contextmanager
def _server(address: str | None, access: Access) -> Iterator[tuple[str, Access]]:
    """The server to trace, and how it is reached: the one named, the one that runs here, or our own under load."""
    if address is not None:
        yield address, access
        return
    with connect(DEFAULT_ADDRESS, access) as client:
        if client.is_ready():
            yield DEFAULT_ADDRESS, access
            return
    err.print(f"nobody answers at {DEFAULT_ADDRESS}: starting a server with {_LOAD_REQUESTS} requests for it")
    # A GPU cache that is too small for the load, so that the pipeline runs.
    with own_stack_config("asymmetric", "8MiB", "512MiB") as (config, directory):
        stack = LocalStack(config, directory, on_event=lambda line: err.print(line, markup=False))
        with stack:
            with starting():
                stack.wait_ready()
            explain_device(stack.server_info().device)
            with _load(stack.connect()):
                yield stack.address, Access()


@contextmanager
def _load(client: Client) -> Iterator[None]:
    """Requests without end; entered once they decode on both processors."""
    stop = threading.Event()
    ids = [f"load-{number}" for number in range(_LOAD_REQUESTS)]
    with ThreadPoolExecutor(_LOAD_REQUESTS) as pool, client:
        requests = [pool.submit(_ask, client, request_id, stop) for request_id in ids]
        try:
            while client.server_info().counters.generated_tokens < _LOAD_REQUESTS * _WARM_TOKENS:
                _raise_failed(requests)
                time.sleep(_POLL_S)
            yield
        finally:
            stop.set()
            while wait(requests, _POLL_S).not_done:  # One may have begun its next answer meanwhile.
                client.abort(*ids)
        _raise_failed(requests)


def _ask(client: Client, request_id: str, stop: threading.Event) -> None:
    while not stop.is_set():
        client.generate(_LOAD_PROMPT, request_id=request_id, max_tokens=_LOAD_TOKENS, ignore_eos=True)


def _raise_failed(requests: list[Future[None]]) -> None:
    for request in requests:
        if request.done():
            request.result()


def _table(summary: Summary) -> Table:
    table = Table(title="where the time went", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right", overflow="fold")
    missed = f", {summary.num_missed} more missed" if summary.num_missed else ""
    table.add_row("iterations", f"{summary.num_iterations}{missed} in {summary.wall_ns / 1e9:.2f} s")
    table.add_row("by mode", summary.describe_modes(), end_section=True)
    table.add_row("gpu_svc busy", f"{summary.gpu_busy_share:.1%}")
    table.add_row("gpu_svc waiting for the CPU or for weights", f"{summary.gpu_bubble_share:.1%}")
    table.add_row("gpu_svc without a plan", f"{summary.idle_share:.1%}")
    for name, (busy, waiting) in summary.services.items():
        table.add_row(f"{name} busy", f"{busy:.1%}")
        table.add_row(f"{name} waiting for a submit", f"{waiting:.1%}")
    table.add_row("both busy at once", f"{summary.both_busy_share:.1%}")
    table.add_row("neither busy", f"{summary.neither_busy_share:.1%}", end_section=True)
    table.add_row("a layer's hop, median", f"{summary.hop_p50_ns / 1e3:.0f} µs")
    table.add_row("all hops", f"{summary.hop_share:.1%}")
    table.add_row("iteration, median", _describe(summary.median))
    if summary.num_predicted:
        table.add_row(
            "predicted against measured",
            f"{summary.predicted_share - 1:+.1%} in all,\noff by {summary.error_p50:.1%} (median),\n"
            f"{summary.error_p95:.1%} (95 of 100 less)",
        )
    slowest = summary.slowest
    table.add_row(f"iteration, slowest: {slowest.iteration}", _describe(times_of(slowest)))
    return table


def _describe(times: IterationTimes) -> str:
    total, gpu = times.total_ns / 1e6, times.gpu_busy_ns / 1e6
    cpu = " and ".join(f"{service.busy_ns / 1e6:.1f}" for service in times.services.values()) or "0.0"
    return f"{total:.1f} ms: gpu_svc {gpu:.1f},\ncpu_attn_svc {cpu}"
