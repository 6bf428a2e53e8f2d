"""What was found, for people as tables and for programs as JSON; docs/simulate.md describes the latter."""

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from planner_svc.simulator.metrics import Metrics
from planner_svc.simulator.study import Outcome
from planner_svc.simulator.workload import Workload

_PLAIN = ("slo", "thr_makespan", "thr_mid", "goodput", "tokens_per_s", "pertok_mean")
_QUANTILES = {"ttft": ("p50", "p95", "p99"), "tpot": ("p50", "p95", "p99"), "gap": ("p50", "p99", "max")}
_BUSY = ("gpu", "cpu", "link_out", "link_in")

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
    return found | {"unfinished": metrics.unfinished}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def table(outcomes: Sequence[Outcome], workload: Workload) -> Table:
    """A row for each, or all there is to say of a single one."""
    if len(outcomes) == 1 and outcomes[0].metrics is not None:
        return _single(outcomes[0], outcomes[0].metrics, workload)
    return _many(outcomes, workload)


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
    result.add_row("requests refused: larger than fits", f"{outcome.refused}")
    result.add_row("requests not finished", f"{metrics.unfinished}")
    return result


def _many(outcomes: Sequence[Outcome], workload: Workload) -> Table:
    result = Table(title=_title("", workload), box=box.SIMPLE, title_justify="left")
    for header in ("machine", "policy"):
        result.add_column(header, no_wrap=True)
    headers = ("rate", "in time", "req/s", "goodput", "TTFT p50/p95/p99, s", "TPOT p50/p95/p99, s")
    for header in (*headers, "s/token", "longest gap, s", "refused", "unfinished"):
        result.add_column(header, justify="right", no_wrap=True)
    for outcome in outcomes:
        metrics = outcome.metrics
        who = (outcome.case.machine, outcome.case.policy)
        if metrics is None:
            result.add_row(*who, "none")
            continue
        result.add_row(
            *who,
            f"{outcome.rate:.4g}",
            f"{metrics.slo:.3f}",
            f"{metrics.thr_makespan:.4g}",
            f"{metrics.goodput:.4g}",
            " / ".join(f"{value:.3g}" for value in (metrics.ttft_p50, metrics.ttft_p95, metrics.ttft_p99)),
            " / ".join(f"{value:.3g}" for value in (metrics.tpot_p50, metrics.tpot_p95, metrics.tpot_p99)),
            f"{metrics.pertok_mean:.3g}",
            f"{metrics.gap_max:.3g}",
            f"{outcome.refused}",
            f"{metrics.unfinished}",
        )
    return result


def _title(subject: str, workload: Workload) -> str:
    empty = f" ({workload.num_empty} without output left out)" if workload.num_empty else ""
    text = f"{len(workload.arrivals)} requests of {workload.name}{empty}"
    return f"{subject}: {text}" if subject else text
