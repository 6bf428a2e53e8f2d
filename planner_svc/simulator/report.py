"""What was found, for people as tables and for programs as JSON; docs/simulate.md describes the latter."""

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from planner_svc.simulator.metrics import ClassMetrics, Metrics
from planner_svc.simulator.study import Outcome
from svc_common.workloads.workload import Workload

_PLAIN = ("slo", "thr_makespan", "thr_mid", "goodput", "tokens_per_s", "pertok_mean")
_QUANTILES = {"ttft": ("p50", "p95", "p99"), "tpot": ("p50", "p95", "p99"), "gap": ("p50", "p99", "max")}
_BUSY = ("gpu", "cpu", "link_out", "link_in")

_SHOWN_CHANGES = 12
"""Of the threads, in the table; JSON has them all."""

_LABELS = {
    "slo": "share of requests in time",
    "thr_makespan": "requests/s over the whole run",
    "thr_mid": "requests/s between 30 % and 70 % of completions",
    "goodput": "requests/s in time, over the whole run",
    "tokens_per_s": "output tokens/s over the whole run",
    "pertok_mean": "mean latency / output tokens, s",
    "ttft": "TTFT, s",
    "tpot": "TPOT, s",
    "gap": "longest gap between two tokens of a request, s",
    "gpu": "GPU busy, share of the time",
    "cpu": "CPU busy",
    "link_out": "link to the host busy",
    "link_in": "link to the GPU busy",
}


def to_json(outcome: Outcome, workload: Workload) -> dict[str, Any]:
    """One run as a JSON object; what is infinite because something never came is null."""
    found: dict[str, Any] = {
        "policy": outcome.case.policy,
        "profile": outcome.case.profile.name,
        "set": dict(outcome.case.changes),
        "workload": workload.name,
        "rate": outcome.rate,
        "requests": outcome.num_requests,
        "refused": outcome.refused,
        "empty": workload.num_empty,
    }
    metrics = outcome.metrics
    if metrics is None:
        return found
    found |= {name: _finite(getattr(metrics, name)) for name in _PLAIN}
    for name, places in _QUANTILES.items():
        found[name] = {place: _finite(getattr(metrics, f"{name}_{place}")) for place in places}
    found["busy"] = {lane: getattr(metrics, f"{lane}_busy") for lane in _BUSY}
    found["classes"] = {item.name: _class_json(item) for item in metrics.classes}
    if metrics.threads:
        found["threads"] = {"mean": metrics.threads_mean, "changes": metrics.threads}
    return found | {"unfinished": metrics.unfinished, "refused_late": metrics.refused_late}


def _class_json(item: ClassMetrics) -> dict[str, Any]:
    return {
        "requests": item.requests,
        "refused_late": item.refused_late,
        "slo": item.slo,
        "ttft": {"p50": _finite(item.ttft_p50), "p95": _finite(item.ttft_p95)},
        "tpot": {"p50": item.tpot_p50, "p95": item.tpot_p95},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def tables(outcomes: Sequence[Outcome], workload: Workload) -> list[Table]:
    """A row for each, or all there is to say of a single one."""
    if len(outcomes) == 1 and outcomes[0].metrics is not None:
        return [_single(outcomes[0], outcomes[0].metrics, workload)]
    return [_rates(outcomes, workload), _latencies(outcomes)]


def _single(outcome: Outcome, metrics: Metrics, workload: Workload) -> Table:
    result = Table(title=_title(outcome.case.label, workload), show_header=False, box=box.SIMPLE, title_justify="left")
    result.add_row("rate, req/s", f"{outcome.rate:.4g}")
    for name in _PLAIN:
        result.add_row(_LABELS[name], f"{getattr(metrics, name):.4g}")
    for name, places in _QUANTILES.items():
        values = " / ".join(f"{getattr(metrics, f'{name}_{place}'):.4g}" for place in places)
        result.add_row(f"{_LABELS[name]}: {' / '.join(places)}", values)
    for lane in _BUSY:
        result.add_row(_LABELS[lane], f"{getattr(metrics, f'{lane}_busy'):.4g}")
    if metrics.threads:
        changes = ", ".join(f"{num} from {at_s:g} s" for at_s, num in metrics.threads[:_SHOWN_CHANGES])
        more = len(metrics.threads) - _SHOWN_CHANGES
        result.add_row("CPU attention threads, mean", f"{metrics.threads_mean:.3g}")
        result.add_row("CPU attention threads", f"{changes}, {more} more changes" if more > 0 else changes)
    result.add_row("requests refused: larger than fits", f"{outcome.refused}")
    result.add_row("requests refused: would have been late", f"{metrics.refused_late}")
    result.add_row("requests not finished", f"{metrics.unfinished}")
    return result


def _rates(outcomes: Sequence[Outcome], workload: Workload) -> Table:
    """What was served. Narrow enough for 80 columns where machines have short names."""
    result = _rows(_title("", workload), "rate", "in time", "req/s", "goodput", "s/token", "max gap, s")
    lacking = {"refused": [o.refused for o in outcomes]}
    lacking["unfinished"] = [o.metrics.unfinished if o.metrics else 0 for o in outcomes]
    shown = [name for name, counts in lacking.items() if any(counts)]
    for name in shown:
        result.add_column(name, justify="right", no_wrap=True)
    for number, outcome in enumerate(outcomes):
        metrics = outcome.metrics
        if metrics is None:
            result.add_row(outcome.case.machine, outcome.case.policy, "none")
            continue
        values = (metrics.thr_makespan, metrics.goodput, metrics.pertok_mean, metrics.gap_max)
        result.add_row(
            outcome.case.machine,
            outcome.case.policy,
            f"{outcome.rate:.4g}",
            f"{metrics.slo:.3f}",
            *(f"{value:.3g}" for value in values),
            *(str(lacking[name][number]) for name in shown),
        )
    return result


def _latencies(outcomes: Sequence[Outcome]) -> Table:
    """How soon."""
    result = _rows(None, "rate", "TTFT p50/p95/p99, s", "TPOT p50/p95/p99, s")
    for outcome in outcomes:
        if (metrics := outcome.metrics) is not None:
            result.add_row(
                outcome.case.machine,
                outcome.case.policy,
                f"{outcome.rate:.4g}",
                f"{metrics.ttft_p50:.3g}/{metrics.ttft_p95:.3g}/{metrics.ttft_p99:.3g}",
                f"{metrics.tpot_p50:.3g}/{metrics.tpot_p95:.3g}/{metrics.tpot_p99:.3g}",
            )
    return result


def classes_table(outcomes: Sequence[Outcome]) -> Table:
    """How each service class fares."""
    result = _rows("Service classes", "rate", "class", "requests", "in time", "refused", "TTFT p50/p95", "TPOT p50/p95")
    for outcome in outcomes:
        for item in outcome.metrics.classes if outcome.metrics else ():
            result.add_row(
                outcome.case.machine,
                outcome.case.policy,
                f"{outcome.rate:.4g}",
                item.name,
                f"{item.requests}",
                "no targets" if item.slo is None else f"{item.slo:.3f}",
                f"{item.refused_late}",
                f"{item.ttft_p50:.3g}/{item.ttft_p95:.3g}",
                f"{item.tpot_p50:.3g}/{item.tpot_p95:.3g}",
            )
    return result


def _rows(title: str | None, *headers: str) -> Table:
    result = Table(title=title, box=box.SIMPLE, title_justify="left", padding=(0, 1, 0, 0))
    result.add_column("machine", overflow="fold")
    result.add_column("policy", no_wrap=True)
    for header in headers:
        result.add_column(header, justify="right", no_wrap=True)
    return result


def _title(subject: str, workload: Workload) -> str:
    empty = f" ({workload.num_empty} without output left out)" if workload.num_empty else ""
    text = f"{len(workload.arrivals)} requests of {workload.name}{empty}"
    return f"{subject}: {text}" if subject else text
