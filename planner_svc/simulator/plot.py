"""Draws what was found: curves over the rates, or the capacities as bars."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from planner_svc.simulator.metrics import Metrics
from planner_svc.simulator.study import Outcome

_COLOURS = ("#1f5fa8", "#c2571a", "#2e8b57", "#8a4fae", "#b0892f", "#6b6b6b")
_MARKERS = "osv^Dx"
_STYLES = {"solid": "-", "dashed": "--", "dotted": ":"}
_PANELS: tuple[tuple[str, bool, tuple[tuple[str, Callable[[Metrics], float]], ...]], ...] = (
    ("share of requests in time", False, (("", lambda m: m.slo),)),
    ("requests/s", False, (("over the whole run", lambda m: m.thr_makespan), ("in time", lambda m: m.goodput))),
    ("mean latency / output tokens, s", True, (("", lambda m: m.pertok_mean),)),
    (
        "TTFT, s",
        True,
        (("p50", lambda m: m.ttft_p50), ("p95", lambda m: m.ttft_p95), ("p99", lambda m: m.ttft_p99)),
    ),
    (
        "TPOT, s",
        True,
        (("p50", lambda m: m.tpot_p50), ("p95", lambda m: m.tpot_p95), ("p99", lambda m: m.tpot_p99)),
    ),
    ("longest gap between two tokens, s", True, (("p50", lambda m: m.gap_p50), ("max", lambda m: m.gap_max))),
)
"""Title, whether the scale is logarithmic, and its lines."""


def draw_curves(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Writes a PNG. Each case is a colour; its rates, at least two, rise along the axes."""
    cases = list(dict.fromkeys(outcome.case for outcome in outcomes))
    figure = Figure(figsize=(15, 8), dpi=110, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, parse_math=False)
    all_axes: list[Axes] = list(figure.subplots(2, 3).flat)
    for axes, (name, is_logarithmic, lines) in zip(all_axes, _PANELS, strict=True):
        styles = [*zip(lines, _STYLES.items(), strict=False)]
        for number, case in enumerate(cases):
            found = sorted((o for o in outcomes if o.case == case), key=lambda outcome: outcome.rate)
            for (line, value), (_, style) in styles:
                points = [(o.rate, value(o.metrics)) for o in found if o.metrics is not None]
                _line(axes, points, number, style, case.label if line == lines[0][0] else "")
        if is_logarithmic:
            _make_logarithmic(axes)
        legend = ", ".join(f"{line} {style}" for (line, _), (style, _) in styles if line)
        axes.set_title(f"{name}: {legend}" if legend else name, loc="left", fontsize=9)
        axes.set_xlabel("requests/s that arrive", fontsize=8)
        _finish(axes)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, format="png")


def draw_capacities(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Writes a PNG: a bar for each case."""
    figure = Figure(figsize=(10, 1.2 + 0.35 * len(outcomes)), dpi=110, layout="constrained")
    axes = figure.subplots()
    places = range(len(outcomes), 0, -1)
    policies = list(dict.fromkeys(outcome.case.policy for outcome in outcomes))
    colours = [_COLOURS[policies.index(outcome.case.policy) % len(_COLOURS)] for outcome in outcomes]
    bars = axes.barh(places, [outcome.rate for outcome in outcomes], color=colours)
    axes.bar_label(bars, [f" {outcome.rate:.3g}" if outcome.rate else " none" for outcome in outcomes], fontsize=8)
    axes.set_yticks(places, [outcome.case.label for outcome in outcomes], fontsize=8)
    axes.set_xlabel("requests/s", fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, parse_math=False)
    _finish(axes)
    figure.savefig(path, format="png")


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, style: str, label: str) -> None:
    """Of the case of that number, without points that have no value. Later ones are thinner: both show if they meet."""
    shown = [(x, y) for x, y in points if math.isfinite(y)]
    axes.plot(
        [x for x, _ in shown],
        [y for _, y in shown],
        color=_COLOURS[number % len(_COLOURS)],
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=4,
        linewidth=max(0.8, 2.6 - 0.4 * number),
        linestyle=style,
        label=label or None,
    )


def _make_logarithmic(axes: Axes) -> None:
    """Zero, of requests of one token, is left out."""
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    for axis_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis_formatter(lambda value, _: f"{value:g}")


def _finish(axes: Axes) -> None:
    axes.tick_params(which="both", labelsize=7)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
