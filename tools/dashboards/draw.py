"""Draws what the dashboards would show, from a Prometheus: for the docs, and where there is no Grafana.

python tools/dashboards/draw.py --url http://127.0.0.1:9090 --start 1790000000 --end 1790000300 --out DIRECTORY
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image
from series import Series, Span, ask, expressions, filled_in, panels
from write import DIRECTORY

_COLUMNS = 24
_COLUMN_IN, _ROW_IN = 0.62, 0.32
_HEAD_IN = 0.35
_COLOURS = 96
"""Of the files: enough for lines and letters, and a third of the bytes."""
_POINTS = 120
_SI = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the dashboards from a Prometheus.")
    parser.add_argument("--url", required=True, help="of the Prometheus")
    parser.add_argument("--start", type=float, help="seconds since 1970; by default an hour before the end")
    parser.add_argument("--end", type=float, help="by default now")
    parser.add_argument("--scrape", type=float, default=5.0, help="seconds between its scrapes (5)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the PNG files")
    arguments = parser.parse_args()
    end = arguments.end or time.time()
    start = arguments.start or end - 3600
    if start >= end:
        parser.error(f"--start must be before --end, {end:g}, is {start:g}")
    span = Span(start, end, max(arguments.scrape, (end - start) / _POINTS), arguments.scrape)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(DIRECTORY.glob("*.json")):
        try:
            draw(json.loads(path.read_text()), arguments.url, span, arguments.out / f"{path.stem}.png")
        except (httpx2.HTTPError, ValueError) as error:
            parser.exit(1, f"{path.name}: {error}\n")


def draw(dashboard: Mapping[str, Any], url: str, span: Span, path: Path) -> None:
    """Writes a PNG with the panels where Grafana has them."""
    everything: Sequence[Mapping[str, Any]] = dashboard["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in everything)
    width_in, height_in = _COLUMNS * _COLUMN_IN, height * _ROW_IN + _HEAD_IN
    figure = Figure(figsize=(width_in, height_in), dpi=72)
    head = 1 - 0.22 / height_in
    figure.text(0.01, head, dashboard["title"], fontsize=12, weight="bold", va="center")
    since = datetime.fromtimestamp(span.start, UTC).strftime("%Y-%m-%d %H:%M UTC")
    figure.text(0.985, head, f"minutes since {since}", fontsize=8, va="center", ha="right")

    def place(grid: Mapping[str, int], margins_in: tuple[float, float, float, float]) -> Axes:
        left, right, top, bottom = margins_in
        x, y = grid["x"] * _COLUMN_IN + left, height_in - _HEAD_IN - (grid["y"] + grid["h"]) * _ROW_IN + bottom
        w, h = grid["w"] * _COLUMN_IN - left - right, grid["h"] * _ROW_IN - top - bottom
        return figure.add_axes((x / width_in, y / height_in, w / width_in, h / height_in))

    for panel in everything:
        if panel["type"] == "row":
            y = height_in - _HEAD_IN - (panel["gridPos"]["y"] + 0.6) * _ROW_IN
            figure.text(0.01, y / height_in, panel["title"], fontsize=10, color="#555555", weight="bold", va="center")
    for panel in panels(dashboard):
        found = [
            series
            for expr, legend in expressions(panel)
            for series in ask(url, filled_in(expr, span.scrape_s), legend, span)
        ]
        is_number = panel["type"] == "stat"
        margins = (0.2, 0.2, 0.3, 0.1) if is_number else (0.65, 0.2, 0.3, 0.75)
        _PAINTERS[panel["type"]](place(panel["gridPos"], margins), panel, found, span)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(_COLOURS).save(path, optimize=True)


def _number(axes: Axes, panel: Mapping[str, Any], found: Sequence[Series], span: Span) -> None:
    values = [value for series in found for _, value in series.points if math.isfinite(value)]
    shown = _formatter(_unit(panel))(values[-1], 0) if values else "no data"
    axes.set_axis_off()
    axes.set_title(panel["title"], loc="left", fontsize=8)
    axes.text(0.5, 0.45, shown, fontsize=20, ha="center", va="center", color="#1f5fa8")


def _graph(axes: Axes, panel: Mapping[str, Any], found: Sequence[Series], span: Span) -> None:
    stacking = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode", "none")
    times = np.arange(span.start, span.end + span.step_s / 2, span.step_s)
    rows = np.array([_on(times, series, span.step_s) for series in found]).reshape(len(found), len(times))
    names = [series.name for series in found]
    minutes = (times - span.start) / 60
    if stacking == "none":
        for row, name in zip(rows, names, strict=True):
            axes.plot(minutes, row, linewidth=1.2, label=name)
    else:
        rows = np.nan_to_num(rows)
        if stacking == "percent":
            rows = rows / np.maximum(rows.sum(axis=0), 1e-12)
        axes.stackplot(minutes, rows, labels=names, alpha=0.75)
    if "min" in panel["fieldConfig"]["defaults"]:
        axes.set_ylim(bottom=panel["fieldConfig"]["defaults"]["min"])
    if names:
        # From the panel's left edge, not the axes'.
        left = -0.6 / (panel["gridPos"]["w"] * _COLUMN_IN)
        axes.legend(loc="upper left", bbox_to_anchor=(left, -0.12), frameon=False, fontsize=6, ncols=_ncols(names))
    _finish(axes, panel, span)


def _heatmap(axes: Axes, panel: Mapping[str, Any], found: Sequence[Series], span: Span) -> None:
    """Prometheus's buckets are cumulative: each row is what its own bucket has beyond the one below."""
    times = np.arange(span.start, span.end + span.step_s / 2, span.step_s)
    ordered = sorted(found, key=lambda series: float(series.labels["le"]))
    rows = np.nan_to_num(np.array([_on(times, series, span.step_s) for series in ordered]))
    counts = np.diff(rows, axis=0, prepend=0).clip(min=0)
    least, most = counts[counts > 0].min(initial=1.0), counts.max(initial=1.0)
    image = np.where(counts > 0, counts, np.nan)
    extent = (0.0, (span.end - span.start) / 60, -0.5, len(ordered) - 0.5)
    axes.imshow(image, origin="lower", aspect="auto", extent=extent, cmap="Oranges", norm=LogNorm(least, most))
    ticks = range(0, len(ordered), 3)
    _finish(axes, panel, span)
    axes.set_yticks(list(ticks), [f"{ordered[index].labels['le']}" for index in ticks])


_PAINTERS: Mapping[str, Callable[[Axes, Mapping[str, Any], Sequence[Series], Span], None]] = {
    "stat": _number,
    "timeseries": _graph,
    "heatmap": _heatmap,
}


def _on(times: np.ndarray[Any, Any], series: Series, step_s: float) -> list[float]:
    """The series at these times; NaN where it has no point."""
    points = {round((at - times[0]) / step_s): value for at, value in series.points}
    return [value if math.isfinite(value := points.get(index, math.nan)) else math.nan for index in range(len(times))]


def _ncols(names: Sequence[str]) -> int:
    return max(1, min(len(names), 70 // (max(map(len, names)) + 6)))


def _finish(axes: Axes, panel: Mapping[str, Any], span: Span) -> None:
    axes.set_title(panel["title"], loc="left", fontsize=8)
    axes.set_xlim(0, (span.end - span.start) / 60)
    axes.tick_params(labelsize=6)
    axes.yaxis.set_major_formatter(FuncFormatter(_formatter(_unit(panel))))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _unit(panel: Mapping[str, Any]) -> str:
    defaults = panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]
    unit: str = defaults["unit"]
    return unit


def _formatter(unit: str) -> Callable[[float, int], str]:
    """Values as Grafana writes them."""

    def seconds(value: float, _: int) -> str:
        for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value:.3g} s" if value == 0 else f"{value / 1e-9:.3g} ns"

    def scaled(suffix: str) -> Callable[[float, int], str]:
        def shown(value: float, _: int) -> str:
            for scale, name in _SI:
                if abs(value) >= scale:
                    return f"{value / scale:.3g} {name}{suffix}"
            return f"{value:.3g}{' ' if suffix else ''}{suffix}"

        return shown

    if unit == "s":
        return seconds
    if unit == "percentunit":
        return lambda value, _: f"{value * 100:.3g} %"
    return scaled({"bytes": "B", "Bps": "B/s", "reqps": "req/s", "ops": "/s"}.get(unit, ""))


if __name__ == "__main__":
    main()
