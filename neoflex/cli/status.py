"""`neoflex status`: what a running server is, holds and has done."""

import dataclasses
import json
import sys
from typing import Annotated

import typer
from rich.table import Table

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
    connect,
)
from neoflex.cli.output import counter_rows, explain_device, memory_rows, out
from neoflex.cli.tables import print_table
from neoflex.types import CalibrationFactors, ClassLoad, HostPool, Load, ModelInfo, ServerInfo
from svc_common.memory import size_text
from svc_common.wording import counted


def status(
    address: ServerAddress = DEFAULT_ADDRESS,
    tls: UseTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
    api_key_file: ApiKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show model, placement, load and counters of a running server."""
    access = access_of(tls, ca_file, certificate_file, key_file, server_name, api_key_file)
    with connect(address, access) as client:
        model, server, load = client.model_info(), client.server_info(), client.load()
        is_alive = client.is_alive()
    if as_json:
        asdict = dataclasses.asdict
        parts = {"model": asdict(model), "server": asdict(server), "load": asdict(load), "is_alive": is_alive}
        sys.stdout.write(json.dumps(parts) + "\n")
    else:
        out.print(_table(address, is_alive, model, server, load))
        print_table(_classes(server, load))
        if server.calibration:
            out.print(_calibration(server.calibration))
        explain_device(server.device)


def _table(address: str, is_alive: bool, model: ModelInfo, server: ServerInfo, load: Load) -> Table:
    table = Table(title=f"NeoFlex {server.version} at {address}", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right", overflow="fold")
    table.add_row("model", model.name)
    table.add_row("architecture", f"{model.architecture}, {model.num_parameters / 1e6:,.0f} M parameters")
    table.add_row("context", f"{model.context_tokens:,} tokens")
    table.add_row("device", f"{server.device}, computes in {model.compute_dtype}")
    table.add_row("CPU attention threads", _threads(server))
    table.add_row("up for", f"{server.uptime_s:,.0f} s")
    table.add_row("ready", f"no: {server.not_ready}" if server.not_ready else "yes")
    table.add_row("alive", "yes" if is_alive else "no", end_section=True)
    if server.memory_use:
        for place, what in memory_rows(server.memory_use):
            table.add_row(place, what.replace(", ", ",\n"))  # A line may be too short for all.
    on_gpu = _tier(load.gpu_blocks_used, load.gpu_blocks_total, server.block_bytes)
    on_host = _tier(load.host_blocks_used, load.host_blocks_total, server.host_block_bytes)
    table.add_row("KV on the GPU", f"{on_gpu} in {model.kv_dtype}")
    table.add_row("  blocks", f"{load.gpu_blocks_used:,} of {load.gpu_blocks_total:,}")
    table.add_row("KV on the host", f"{on_host} in {model.host_kv_dtype}")
    table.add_row("  blocks", f"{load.host_blocks_used:,} of {load.host_blocks_total:,}")
    if len(server.host_pools) > 1:
        for number, (pool, used) in enumerate(zip(server.host_pools, load.host_pool_blocks_used, strict=False)):
            table.add_row(f"  pool {number}", _pool(pool, used, server.host_block_bytes))
    table.add_row("tokens in a KV block", str(server.block_tokens))
    table.add_row("its size on the GPU", size_text(server.block_bytes))
    table.add_row("and on the host", size_text(server.host_block_bytes), end_section=True)
    table.add_row("requests running", str(load.running_requests))
    table.add_row("requests waiting", f"{load.waiting_requests} of at most {load.max_waiting_requests:,}")
    counters = server.counters
    table.add_row("requests accepted", f"{counters.accepted_requests:,}")
    table.add_row("requests finished", f"{counters.finished_requests:,}")
    table.add_row("requests refused", f"{counters.refused_requests:,}", end_section=True)
    for name, value in counter_rows(counters):
        table.add_row(name, value)
    return table


def _classes(server: ServerInfo, load: Load) -> Table:
    """Fits 80 columns beside names of usual length."""
    default = next((item.name for item in server.service_classes if item.is_default), "none")
    title = f"\nService classes, {default} by default"
    table = Table("class", title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("TTFT/TPOT, s", "priority", "share", "runs", "waits", "in time", "late", "refused"):
        table.add_column(column, justify="right")
    loads = {item.name: item for item in load.classes}
    for item in server.service_classes:
        now = loads.get(item.name, ClassLoad(item.name, 0, 0))
        table.add_row(
            item.name,
            "none" if item.ttft_s is None else f"{item.ttft_s:g}/{item.tpot_s:g}",
            str(item.priority),
            f"{item.share:g}",
            f"{now.running_requests:,}",
            f"{now.waiting_requests:,}",
            f"{item.requests_in_time:,}",
            f"{item.requests_late:,}",
            f"{item.requests_refused:,}" if item.refuses_late else "never",
        )
    return table


def _calibration(factors: CalibrationFactors) -> Table:
    """What was learned, in the order in which an iteration is made up."""
    title = "\nMeasured over what was told at the start, by part of an iteration"
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for part, value in (
        ("linear operations, one token", factors.weights),
        ("linear operations, further tokens", factors.tokens),
        ("attention of prompts", factors.prefill),
        ("attention of decodes on the GPU", factors.gpu_decode),
        ("attention of decodes on the CPU", factors.cpu_decode),
        *((f"attention of decodes in pool {pool}", value) for pool, value in sorted(factors.further_pools.items())),
        ("output head and sampling", factors.head),
        ("moving KV between tiers", factors.swap),
        ("the rest", factors.overhead),
    ):
        table.add_row(part, f"{value:.2f}")
    table.add_row("slower while both processors work", f"{factors.contention:.0%}")
    return table


def _threads(server: ServerInfo) -> str:
    if server.cpu_attention_max_threads == 0:
        return str(server.cpu_attention_threads)
    least, most = server.cpu_attention_min_threads, server.cpu_attention_max_threads
    return f"{server.cpu_attention_threads}, elastic from {least} to {most}"


def _pool(pool: HostPool, used: int, block_bytes: int) -> str:
    if pool.num_blocks == 0:
        return f"not attached: {pool.error}"
    return f"{_tier(used, pool.num_blocks, block_bytes)}, {counted(pool.num_threads, 'thread')}"


def _tier(used: int, total: int, block_bytes: int) -> str:
    return f"{size_text(used * block_bytes)} of {size_text(total * block_bytes)}"
