"""Writes simulated iterations as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing show.

Five lanes: what each iteration is, and how long GPU, CPU and either way of the link work in it. The estimator says how
long a lane works, not when: its work is drawn from the iteration's start, and what is left of it as a bubble if it is a
processor that works at all. Events are written as they come, so that memory does not grow with the run.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from planner_svc.estimator import Timeline
from planner_svc.simulator.policy import Policy
from planner_svc.simulator.simulation import Observer
from svc_common.plan import IterationPlan

_PID = 1
_ITERATIONS, _GPU, _CPU, _LINK_OUT, _LINK_IN = 1, 2, 3, 4, 5
_LANES = {_ITERATIONS: "iterations", _GPU: "GPU", _CPU: "CPU", _LINK_OUT: "link to host", _LINK_IN: "link to GPU"}


@contextmanager
def writing(path: Path, title: str) -> Iterator[Observer]:
    """The file is complete when the context ends, however it does."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        writer = _Writer(file)
        writer.name_lanes(title)
        try:
            yield writer.write
        finally:
            file.write("\n]}\n")


class _Writer:
    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._separator = ""

    def name_lanes(self, title: str) -> None:
        self._event("M", "process_name", args={"name": title})
        for tid, name in _LANES.items():
            self._event("M", "thread_name", tid=tid, args={"name": name})
            self._event("M", "thread_sort_index", tid=tid, args={"sort_index": tid})

    def write(self, start_s: float, plan: IterationPlan, timeline: Timeline, policy: Policy) -> None:
        """One iteration; an Observer. Those that take no time are left out."""
        total_s = timeline.total_s
        if total_s == 0:
            return
        mode = plan.mode.value
        self._span(mode, _ITERATIONS, start_s, total_s, _describe(plan))
        lanes = ((_GPU, timeline.gpu_s), (_CPU, timeline.cpu_s))
        for tid, worked_s in (*lanes, (_LINK_OUT, timeline.link_out_s), (_LINK_IN, timeline.link_in_s)):
            if worked_s > 0:
                self._span(mode, tid, start_s, min(worked_s, total_s), {"worked_s": worked_s})
        for tid, worked_s in lanes:
            if 0 < worked_s < total_s:
                self._span("bubble", tid, start_s + worked_s, total_s - worked_s, {})
        self._counter("requests", start_s, running=policy.num_running, waiting=policy.num_waiting)
        self._counter("KV blocks", start_s, GPU=policy.gpu_blocks_used, host=policy.host_blocks_used)

    def _span(self, name: str, tid: int, start_s: float, lasts_s: float, arguments: dict[str, Any]) -> None:
        self._event("X", name, tid=tid, ts=start_s * 1e6, dur=lasts_s * 1e6, args=arguments)

    def _counter(self, name: str, at_s: float, **values: int) -> None:
        self._event("C", name, ts=at_s * 1e6, args=values)

    def _event(self, phase: str, name: str, **fields: Any) -> None:
        """Times in microseconds."""
        self._file.write(self._separator + json.dumps({"ph": phase, "name": name, "pid": _PID, **fields}))
        self._separator = ",\n"


def _describe(plan: IterationPlan) -> dict[str, Any]:
    described: dict[str, Any] = {
        "iteration": plan.iteration,
        "sub_batches": [
            {
                "prefill_tokens": sum(chunk.num_tokens for chunk in batch.prefills),
                "gpu_decodes": len(batch.gpu_decodes),
                "cpu_decodes": len(batch.cpu_decodes),
            }
            for batch in plan.sub_batches
        ],
        "swaps": len(plan.swaps),
    }
    if plan.cohort is not None:
        described["cohort"] = {
            "sequences": len(plan.cohort.sequence_ids),
            "start_layer": plan.cohort.start_layer,
            "layers": plan.cohort.num_layers,
        }
    return described
