"""What a dashboard's panels show: their expressions, filled in, asked of a Prometheus."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

Labels = Mapping[str, str]
RATE_SCRAPES = 4
"""Scrapes in $__rate_interval, as in Grafana."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time and how finely it is looked at; seconds since 1970, seconds."""

    start: float
    end: float
    step_s: float
    scrape_s: float


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    """The legend, filled in."""
    labels: Labels
    points: tuple[tuple[float, float], ...]
    """Time and value; NaN where there is none, as a quantile of no observations."""


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of Grafana's JSON that show something, rows left out."""
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions(panel: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each expression of a panel, and its legend."""
    for target in panel["targets"]:
        yield target["expr"], target["legendFormat"]


def filled_in(expr: str, scrape_s: float) -> str:
    """For everything there is to choose at the top."""
    return re.sub(
        r"\$\{?(planner|class|host)\}?", ".*", expr.replace("$__rate_interval", f"{RATE_SCRAPES * scrape_s:g}s")
    )


def ask(url: str, expr: str, legend: str, span: Span) -> list[Series]:
    """The series of a filled-in expression. Raises httpx2.HTTPError, and ValueError with what Prometheus says."""
    query = {"query": expr, "start": str(span.start), "end": str(span.end), "step": f"{span.step_s:g}"}
    answer = httpx2.post(f"{url}/api/v1/query_range", data=query, timeout=30).json()
    if answer["status"] != "success":
        raise ValueError(f"{expr}: {answer['error']}")
    return [
        Series(
            _named(legend, found["metric"]),
            found["metric"],
            tuple((float(at), float(value)) for at, value in found["values"]),
        )
        for found in answer["data"]["result"]
    ]


def _named(legend: str, labels: Labels) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend).strip()
