"""Draws latency and throughput against the load."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from neoflex.bench.summary import Percentiles, Summary

_STYLES = {"p50": "-", "p95": "--", "p99": ":"}
_COLOUR, _SECOND = "#1f5fa8", "#c2571a"
_LATENCIES: tuple[tuple[str, Callable[[Summary], Percentiles | None]], ...] = (
    ("TTFT, s", lambda run: run.ttft),
    ("TPOT, s", lambda run: run.tpot),
    ("end to end, s", lambda run: run.end_to_end),
)


def draw(runs: Sequence[Summary], title: str, unit: str, path: Path) -> None:
    """Writes a PNG. `unit` of the runs' levels."""
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    panels: list[Axes] = list(figure.subplots(2, 2).flat)
    runs = sorted(runs, key=lambda run: run.level)
    levels = [run.level for run in runs]
    for axes, (name, latency) in zip(panels, _LATENCIES, strict=False):
        for percentile, style in _STYLES.items():
            points = [(run.level, getattr(found, percentile)) for run in runs if (found := latency(run))]
            axes.plot(*zip(*points, strict=True), style, color=_COLOUR, marker="o", markersize=4, label=percentile)
        axes.set_ylim(bottom=0)
        _finish(axes, name, unit)
    throughput = panels[-1]
    throughput.plot(levels, [run.requests_per_s for run in runs], "o-", color=_COLOUR, markersize=4, label="finished")
    if runs[0].goodput_per_s is not None:
        goodput = [run.goodput_per_s or 0.0 for run in runs]
        throughput.plot(levels, goodput, "s--", color=_SECOND, markersize=4, label="in time")
    throughput.set_ylim(bottom=0)
    _finish(throughput, "requests/s", unit)
    figure.savefig(path, format="png")


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
