"""Draws traces: some iterations in a row, and a few layers of one of them, each side a lane."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from neoflex.trace.services import service_names
from neoflex.trace.summary import Summary
from svc_common.trace import COHORT, IterationTrace, TraceEvent, TraceEvents, TraceKind, batch_name

_MAX_ITERATIONS = 5
_NUM_LAYERS = 3
_GPU_LANE = 1.0
_LANE_HEIGHT = 0.72
_LINEAR, _ATTENTION, _BESIDE, _BUBBLE = 0, 1, 2, 3
# By sub-batch: linear operations and attention.
_COLOURS = {0: ("#1f5fa8", "#7fb2e5"), 1: ("#c2571a", "#f2ae7e"), COHORT: ("#2c7a4b", "#93d0aa")}
_BESIDE_COLOUR, _BUBBLE_COLOUR = "#6b6b6b", "#f3f3f3"
_CLASSES = {
    TraceKind.PRE_ATTENTION: _LINEAR,
    TraceKind.POST_ATTENTION: _LINEAR,
    TraceKind.ATTEND_PREFILLS: _ATTENTION,
    TraceKind.ATTEND_DECODES: _ATTENTION,
    TraceKind.CPU_ATTEND: _ATTENTION,
    TraceKind.CPU_LAYER: _LINEAR,
    TraceKind.RUN_PROMPTS: _LINEAR,
    TraceKind.REPLAY: _LINEAR,
    TraceKind.WAIT: _BUBBLE,
    TraceKind.REPORT: _BUBBLE,
    TraceKind.CPU_WAIT: _BUBBLE,
    TraceKind.WEIGHT_WAIT: _BUBBLE,
    TraceKind.WEIGHT_COPY: _BESIDE,
}
_LABELS = {
    TraceKind.PRE_ATTENTION: "pre",
    TraceKind.POST_ATTENTION: "post",
    TraceKind.ATTEND_PREFILLS: "prefill attention",
    TraceKind.ATTEND_DECODES: "attention",
    TraceKind.CPU_ATTEND: "attention",
    TraceKind.CPU_LAYER: "layer",
    TraceKind.RUN_PROMPTS: "prompts",
    TraceKind.REPLAY: "graph",
    TraceKind.WAIT: "waits",
    TraceKind.CPU_WAIT: "waits",
    TraceKind.WEIGHT_WAIT: "waits",
    TraceKind.WEIGHT_COPY: "weights",
}


def draw(traces: Sequence[IterationTrace], summary: Summary, path: Path) -> None:
    """Writes a PNG of at least one iteration."""
    middle = _representative(traces)
    figure = Figure(figsize=(15, 7.2), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1)
    figure.suptitle(_title(summary), x=0.01, ha="left", fontsize=11)
    first = max(0, min(middle - _MAX_ITERATIONS // 2, len(traces) - _MAX_ITERATIONS))
    drawn = traces[first : first + _MAX_ITERATIONS]
    _draw_iterations(top, drawn, Lanes.of(drawn))
    _draw_layers(bottom, traces[middle], Lanes.of([traces[middle]]))
    shown = {batch.index for trace in drawn for batch in trace.sub_batches}
    figure.legend(handles=_legend(sorted(shown)), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _title(summary: Summary) -> str:
    return (
        f"{summary.num_iterations} iterations in {summary.wall_ns / 1e9:.2f} s: {summary.describe_modes()}.   "
        f"gpu_svc: {summary.gpu_busy_share:.0%} busy, {summary.gpu_bubble_share:.0%} waiting, "
        f"{summary.idle_share:.0%} idle.   "
        f"cpu_attn_svc: {summary.cpu_busy_share:.0%} busy.   Both at once: {summary.both_busy_share:.0%}"
    )


def _representative(traces: Sequence[IterationTrace]) -> int:
    """Index of the iteration of median duration among those of the kind that shows most."""

    def rank(trace: IterationTrace) -> tuple[bool, bool, bool]:
        prefills = any(batch.prefill_tokens for batch in trace.sub_batches)
        pipelines = len(trace.sub_batches) == 2 and len(trace.cpu) > 0
        return pipelines and not prefills, len(trace.cpu) > 0, bool(trace.sub_batches)

    best = max(map(rank, traces))
    chosen = [i for i, trace in enumerate(traces) if rank(trace) == best]
    return sorted(chosen, key=lambda i: traces[i].duration_ns)[len(chosen) // 2]


@dataclass(frozen=True)
class Lanes:
    """Where each process's bars lie: one below the other, the link lowest."""

    has_link: bool
    services: dict[int, str]
    """Names by host pool."""

    @classmethod
    def of(cls, traces: Sequence[IterationTrace]) -> "Lanes":
        return cls(any(len(trace.link) for trace in traces), service_names(traces))

    def by_name(self) -> dict[str, float]:
        names = ["gpu_svc", *self.services.values(), *(["link"] if self.has_link else [])]
        return {name: _GPU_LANE - place for place, name in enumerate(names)}

    def filled(self, trace: IterationTrace) -> Iterator[tuple[float, TraceEvents]]:
        """Those of one iteration, with what is in them."""
        places = self.by_name()
        yield places["gpu_svc"], trace.gpu
        for events in trace.cpu:
            yield places[self.services[events.pool]], events
        if self.has_link:
            yield places["link"], trace.link


def _draw_iterations(axes: Axes, traces: Sequence[IterationTrace], lanes: Lanes) -> None:
    base_ns = traces[0].start_ns
    for trace in traces:
        for lane, events in lanes.filled(trace):
            for event in trace.events(events):
                _bar(axes, lane, event, base_ns)
        for edge_ns in (trace.start_ns, trace.end_ns):
            axes.axvline((edge_ns - base_ns) / 1e6, color="black", linewidth=0.8)
        middle_ms = (trace.start_ns + trace.duration_ns / 2 - base_ns) / 1e6
        axes.text(middle_ms, 1.46, _describe(trace), ha="center", va="bottom", fontsize=8)
    axes.set_xlim(0, (traces[-1].end_ns - base_ns) / 1e6)
    _finish(axes, "ms", lanes.by_name())


def _describe(trace: IterationTrace) -> str:
    lines = [f"iteration {trace.iteration}, {trace.duration_ns / 1e6:.1f} ms"]
    for batch in trace.sub_batches:
        counts = ((batch.prefill_tokens, "prompt tokens"), (batch.gpu_decodes, "on GPU"), (batch.cpu_decodes, "on CPU"))
        lines.append(f"{batch_name(batch.index)}: " + ", ".join(f"{num} {what}" for num, what in counts if num))
    return "\n".join(lines)


def _draw_layers(axes: Axes, trace: IterationTrace, lanes: Lanes) -> None:
    """Layers from the middle of the iteration, with names on the bars that have room for them."""
    # A cohort's layers are others than those of the batch beside it.
    alone = all(batch.index == COHORT for batch in trace.sub_batches)
    on_gpu = list(trace.events(trace.gpu))
    in_layers = [event for event in on_gpu if event.layer >= 0 and (alone or event.sub_batch != COHORT)]
    layers = sorted({event.layer for event in in_layers})
    first = max(0, len(layers) // 2 - 1)
    shown = layers[first : first + _NUM_LAYERS]
    steps = [event for event in in_layers if event.layer in shown] or on_gpu
    start_ns, end_ns = steps[0].start_ns, steps[-1].end_ns
    for lane, events in lanes.filled(trace):
        for event in trace.events(events):
            if event.end_ns > start_ns and event.start_ns < end_ns:
                _bar(axes, lane, event, start_ns)
                _label(axes, lane, event, start_ns, end_ns)
    axes.set_xlim(0, (end_ns - start_ns) / 1e6)
    which = f"layers {shown[0]} to {shown[-1]} of {layers[0]} to {layers[-1]}" if shown else "no layers"
    axes.set_title(f"iteration {trace.iteration}, {which}; numbers on the bars are layers", loc="left", fontsize=10)
    _finish(axes, "ms", lanes.by_name())


def _bar(axes: Axes, lane: float, event: TraceEvent, base_ns: int) -> None:
    kind = _CLASSES.get(event.kind, _BESIDE)
    bubble = kind == _BUBBLE
    axes.barh(
        lane,
        event.duration_ns / 1e6,
        left=(event.start_ns - base_ns) / 1e6,
        height=_LANE_HEIGHT,
        color=_colour(kind, event.sub_batch),
        edgecolor="#c9c9c9" if bubble else None,
        hatch="////" if bubble else None,
        linewidth=0.0,
        zorder=1 if bubble else 2,  # Hatches reach over their edges.
    )


def _colour(kind: int, sub_batch: int) -> str:
    if kind == _BUBBLE:
        return _BUBBLE_COLOUR
    if kind == _BESIDE or sub_batch not in _COLOURS:
        return _BESIDE_COLOUR
    return _COLOURS[sub_batch][kind]


def _label(axes: Axes, lane: float, event: TraceEvent, start_ns: int, end_ns: int) -> None:
    """Centred in the part of the bar that is seen."""
    left_ns, right_ns = max(event.start_ns, start_ns), min(event.end_ns, end_ns)
    share = (right_ns - left_ns) / (end_ns - start_ns)
    text = _LABELS.get(event.kind, "")
    if share < 0.010 + 0.0028 * len(text) or not text:
        return
    kind = _CLASSES[event.kind]
    number = "" if kind == _BUBBLE else f"\n{event.layer}"
    axes.text(
        ((left_ns + right_ns) / 2 - start_ns) / 1e6,
        lane,
        f"{text}{number}",
        ha="center",
        va="center",
        fontsize=8,
        color="white" if kind in (_LINEAR, _BESIDE) else "black",
    )


def _finish(axes: Axes, unit: str, lanes: Mapping[str, float]) -> None:
    axes.set_yticks(list(lanes.values()), list(lanes))
    axes.set_ylim(min(lanes.values()) - 0.45, 1.45)
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(sub_batches: Sequence[int]) -> list[Patch]:
    handles = []
    for sub_batch in sub_batches:
        linear, attention = _COLOURS[sub_batch]
        handles.append(Patch(color=linear, label=f"{batch_name(sub_batch)}: linear operations"))
        handles.append(Patch(color=attention, label=f"{batch_name(sub_batch)}: attention"))
    handles.append(Patch(color=_BESIDE_COLOUR, label="copies, weights, bookkeeping, head and sampling"))
    handles.append(
        Patch(
            facecolor=_BUBBLE_COLOUR,
            edgecolor="#c9c9c9",
            hatch="////",
            label="bubble: waits for the other side or for weights",
        )
    )
    return handles
