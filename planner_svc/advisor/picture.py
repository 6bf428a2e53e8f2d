"""Draws an iteration of each phase of the choice, each lane a row, as `neoflex trace` draws real iterations."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from planner_svc.policy import (
    KIND_NAMES,
    Lane,
    PhaseEstimate,
    PolicyEstimator,
    Prediction,
    Segment,
    Step,
    Timeline,
    layers_text,
)

_ROWS = {Lane.GPU: 3.0, Lane.CPU: 2.0, Lane.UP: 1.0, Lane.DOWN: 0.0}
_HEIGHT = 0.72
_GROUP_COLOURS = (("#1f5fa8", "#7fb2e5"), ("#c2571a", "#f2ae7e"))
"""Of layers and attention."""
_STEP_COLOURS = {Step.WEIGHTS: "#2c7a4b", Step.HIDDEN: "#8a4fae", Step.KV: "#b0892f", Step.HEAD: "#6b6b6b"}
_LEAST_SHARE = 0.02
"""Of the width, that a bar with a number has."""
_LEAST_EDGED = 0.004
"""Of a bar that its own edges would not hide."""


def draw(title: str, estimator: PolicyEstimator, best: Prediction, paths: Sequence[Path]) -> None:
    """Writes a PNG or SVG to each path, by its suffix."""
    figure = Figure(figsize=(15, 7.2), dpi=120, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, parse_math=False)
    for axes, of_decode in zip(figure.subplots(2, 1), (False, True), strict=True):
        phase = best.decode if of_decode else best.prefill
        layers = layers_text(best, estimator.model.num_layers, of_decode=of_decode)
        _draw_phase(axes, estimator.timeline(best, of_decode=of_decode))
        axes.set_title(_describe(phase, layers, of_decode=of_decode), loc="left", fontsize=10)
    groups = max(best.prefill.num_groups, best.decode.num_groups)
    figure.legend(handles=_legend(groups), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    for path in paths:
        figure.savefig(path, format=path.suffix.removeprefix("."))


def _describe(phase: PhaseEstimate, layers: str, *, of_decode: bool) -> str:
    name = f"a token of each answer, of {phase.num_iterations}" if of_decode else "prefill, the first iteration"
    return f"{name}: {KIND_NAMES[phase.kind]}, {layers}; numbers on the bars are layers"


def _draw_phase(axes: Axes, timeline: Timeline) -> None:
    length_s = timeline.end_s - timeline.start_s
    for item in timeline.segments:
        left_s = max(item.start_s, timeline.start_s)
        width_s = min(item.end_s, timeline.end_s) - left_s
        at_ms = (left_s - timeline.start_s) * 1e3
        axes.barh(
            _ROWS[item.lane],
            width_s * 1e3,
            left=at_ms,
            height=_HEIGHT,
            color=_colour(item),
            edgecolor="white",
            linewidth=0.3 if width_s > _LEAST_EDGED * length_s else 0.0,
        )
        if item.layer >= 0 and width_s > _LEAST_SHARE * length_s:
            middle_ms = at_ms + width_s * 500
            colour = "black" if item.step is Step.ATTENTION else "white"
            axes.text(middle_ms, _ROWS[item.lane], str(item.layer), ha="center", va="center", fontsize=7, color=colour)
    axes.set_xlim(0, length_s * 1e3)
    axes.set_ylim(-0.45, 3.45)
    axes.set_yticks(list(_ROWS.values()), [lane.value for lane in _ROWS])
    axes.set_xlabel("ms", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _colour(item: Segment) -> str:
    if item.step in _STEP_COLOURS:
        return _STEP_COLOURS[item.step]
    return _GROUP_COLOURS[item.group][item.step is Step.ATTENTION]


def _legend(num_groups: int) -> list[Patch]:
    names = ("all sequences",) if num_groups == 1 else ("first group", "second group")
    handles = []
    for name, (layer, attention) in zip(names, _GROUP_COLOURS, strict=False):
        handles.append(Patch(color=layer, label=f"{name}: layers"))
        handles.append(Patch(color=attention, label=f"{name}: attention over KV on the host"))
    return handles + [Patch(color=colour, label=step.value) for step, colour in _STEP_COLOURS.items()]
