"""What was found, for people as tables and for programs as JSON."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner_svc.policy import (
    Comparison,
    Lane,
    PhaseEstimate,
    PolicyEstimator,
    Prediction,
    TierUse,
    layer_counts,
    pair_text,
    reasons,
)

_GB = 1e9


def to_json(title: str, estimator: PolicyEstimator, comparison: Comparison) -> dict[str, Any]:
    """Of one call; the first policy is the choice."""
    return {
        "title": title,
        "mix": asdict(comparison.best.mix),
        "why": reasons(estimator, comparison),
        "policies": [_prediction(item) for item in comparison.by_kind],
    }


def tables(title: str, estimator: PolicyEstimator, comparison: Comparison) -> RenderableType:
    """Times, traffic and memory of each kind of policy, and the reasons. 80 columns are enough for all tables."""
    num_layers = estimator.model.num_layers
    why = [Padding(Text(line), (0, 0, 0, 2)) for line in reasons(estimator, comparison)]
    parts: list[RenderableType] = [Text(title), _times(comparison), _layers(comparison, num_layers)]
    parts += [_lanes(comparison.best), _traffic(comparison), *_memory(comparison)]
    return Group(*parts, Text("Why", style="bold"), *why)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _times(comparison: Comparison) -> Table:
    title = "Policies, prefill / decode: the best of each kind"
    table = _table(title, "policy", "x best", "all, s", "TTFT, s", "TPOT, ms", "tokens/s")
    for item in comparison.by_kind:
        table.add_row(
            pair_text(item),
            f"{item.total_s / comparison.best.total_s:.2f}",
            f"{item.total_s:.3g}",
            f"{item.ttft_s:.3g}",
            f"{item.tpot_s * 1e3:.3g}",
            f"{item.output_tokens_per_s:.3g}",
        )
    return table


def _layers(comparison: Comparison, num_layers: int) -> Table:
    table = _table("Layers on the CPU, streamed to the GPU, resident there", "policy", "prefill", "decode")
    for item in comparison.by_kind:
        phases = (layer_counts(item, num_layers, of_decode=of_decode) for of_decode in (False, True))
        table.add_row(pair_text(item), *(" / ".join(map(str, counts)) for counts in phases))
    return table


def _lanes(best: Prediction) -> Table:
    """How long each lane works in one iteration of the choice."""
    table = _table("An iteration of the choice, ms", "phase", "takes", *(lane.value for lane in Lane), "groups")
    for name, phase in (("prefill", best.prefill), ("decode", best.decode)):
        busy = (f"{phase.busy_s[lane] * 1e3:.3g}" for lane in Lane)
        table.add_row(name, f"{phase.iteration_s * 1e3:.3g}", *busy, str(phase.num_groups))
    return table


def _traffic(comparison: Comparison) -> Table:
    table = _table("Over the link, GB an iteration", "policy", "prefill: up", "down", "decode: up", "down")
    for item in comparison.by_kind:
        sizes = (size for phase in (item.prefill, item.decode) for size in (phase.up_bytes, phase.down_bytes))
        table.add_row(pair_text(item), *map(_gb, sizes))
    return table


def _memory(comparison: Comparison) -> tuple[Table, Table]:
    """At its fullest."""
    on_gpu = _table("Memory of the GPU, GB", "policy", "weights", "buffers", "KV", "activations")
    on_host = _table("Memory of the host, GB", "policy", "weights", "KV", "sequences with KV there")
    for item in comparison.by_kind:
        gpu, host = item.memory.gpu, item.memory.host
        on_gpu.add_row(pair_text(item), *map(_gb, (gpu.weights, gpu.buffers, gpu.kv, gpu.activations)))
        sequences = f"{item.memory.num_host_sequences} of {item.mix.num_sequences}"
        on_host.add_row(pair_text(item), _gb(host.weights), _gb(host.kv), sequences)
    return on_gpu, on_host


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / _GB:.3g}" if num_bytes >= 1e6 else f"{num_bytes / _GB:.1g}" if num_bytes else "0"


def _prediction(item: Prediction) -> dict[str, Any]:
    return {
        "name": pair_text(item),
        **asdict(item.policy),
        "ttft_s": item.ttft_s,
        "tpot_s": item.tpot_s,
        "total_s": item.total_s,
        "output_tokens_per_s": item.output_tokens_per_s,
        "prefill": _phase(item.prefill),
        "decode": _phase(item.decode),
        "memory": {
            "gpu": _tier(item.memory.gpu),
            "host": _tier(item.memory.host),
            "host_sequences": item.memory.num_host_sequences,
        },
    }


def _phase(phase: PhaseEstimate) -> dict[str, Any]:
    return {
        "kind": phase.kind.value,
        "cpu_layers": phase.cpu_layers,
        "groups": phase.num_groups,
        "iterations": phase.num_iterations,
        "iteration_s": phase.iteration_s,
        "total_s": phase.total_s,
        "busy_s": {lane.name.lower(): seconds for lane, seconds in phase.busy_s.items()},
        "link_up_bytes": phase.up_bytes,
        "link_down_bytes": phase.down_bytes,
        "binding": phase.binding.name.lower(),
    }


def _tier(use: TierUse) -> dict[str, int]:
    return {f"{name}_bytes": size for name, size in asdict(use).items()} | {"total_bytes": use.total}
