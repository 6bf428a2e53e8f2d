"""What was found, for people as tables and for programs as JSON."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner_svc.policy import (
    Comparison,
    Lane,
    PhaseEstimate,
    PolicyEstimator,
    Prediction,
    TierUse,
    layers_text,
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
    """Times, traffic and memory of each kind of policy, and the reasons."""
    num_layers = estimator.model.num_layers
    why = Text("\n".join(f"  {line}" for line in reasons(estimator, comparison)))
    parts: list[RenderableType] = [Text(title), _times(comparison, num_layers), _lanes(comparison.best)]
    return Group(*parts, _traffic(comparison), Text("Why", style="bold"), why)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _times(comparison: Comparison, num_layers: int) -> Table:
    table = _table(
        "Policies, prefill / decode: the best of each kind",
        "policy",
        "x best",
        "all, s",
        "TTFT, s",
        "TPOT, ms",
        "tokens/s",
        "layers in prefill",
        "layers in decode",
    )
    for item in comparison.by_kind:
        table.add_row(
            pair_text(item),
            f"{item.total_s / comparison.best.total_s:.2f}",
            f"{item.total_s:.3g}",
            f"{item.ttft_s:.3g}",
            f"{item.tpot_s * 1e3:.3g}",
            f"{item.output_tokens_per_s:.3g}",
            layers_text(item, num_layers, of_decode=False),
            layers_text(item, num_layers, of_decode=True),
        )
    return table


def _lanes(best: Prediction) -> Table:
    """How long each lane works in one iteration of the choice."""
    table = _table("An iteration of the choice, ms", "phase", "takes", *(lane.value for lane in Lane), "groups")
    for name, phase in (("prefill", best.prefill), ("decode", best.decode)):
        busy = (f"{phase.busy_s[lane] * 1e3:.3g}" for lane in Lane)
        table.add_row(name, f"{phase.iteration_s * 1e3:.3g}", *busy, str(phase.num_groups))
    return table


def _traffic(comparison: Comparison) -> Table:
    """Over the link in each iteration, and memory at its fullest."""
    table = _table(
        "Link, GB an iteration, and memory, GB",
        "policy",
        "prefill up",
        "down",
        "decode up",
        "down",
        "GPU: weights",
        "buffers",
        "KV",
        "activations",
        "host: weights",
        "KV",
        "KV on host",
    )
    for item in comparison.by_kind:
        gpu, host = item.memory.gpu, item.memory.host
        link = (
            phase_bytes for phase in (item.prefill, item.decode) for phase_bytes in (phase.up_bytes, phase.down_bytes)
        )
        sizes = (*link, gpu.weights, gpu.buffers, gpu.kv, gpu.activations, host.weights, host.kv)
        on_host = f"{item.memory.num_host_sequences} of {item.mix.num_sequences}"
        table.add_row(pair_text(item), *(_gb(size) for size in sizes), on_host)
    return table


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
