"""The table of metrics in docs/telemetry.md, made from their declaration.

PYTHONPATH=. python tests/support/metrics_page.py   # writes it into the page
"""

import re
from collections.abc import Sequence
from pathlib import Path

from svc_common.telemetry.declaration import Instrument
from svc_common.telemetry.instruments import INSTRUMENTS, SERVICES

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"
_BEGIN, _END = "<!-- begin metrics -->", "<!-- end metrics -->"


def metrics_table() -> str:
    """One table for each service, and one for what all have."""
    parts = []
    for title, services in (*((f"`{service}`", (service,)) for service in SERVICES), ("Each service", SERVICES)):
        rows = [_row(instrument) for instrument in INSTRUMENTS if instrument.services == services]
        head = ["| OpenTelemetry | Prometheus | kind, unit | attributes | |", "|---|---|---|---|---|"]
        parts.append("\n".join([f"### {title}", "", *head, *rows]))
    return "\n\n".join([*parts, "Buckets of the histograms:", "\n".join(_buckets())])


def replaced(page: str, table: str) -> str:
    """The page with this table."""
    section = f"{_BEGIN}\n\n{table}\n\n{_END}"
    return re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: section, page, flags=re.S)


def _row(instrument: Instrument) -> str:
    attributes = " ".join(f"`{name}`" for name in instrument.attributes)
    names = f"`{instrument.name}` | `{instrument.prometheus_name}`"
    return f"| {names} | {instrument.kind.value}, {instrument.unit} | {attributes} | {instrument.text} |"


def _buckets() -> list[str]:
    by_bounds: dict[Sequence[float], list[str]] = {}
    for instrument in INSTRUMENTS:
        if instrument.bounds:
            by_bounds.setdefault(instrument.bounds, []).append(f"`{instrument.name}`")
    return [f"- {', '.join(names)}: {' '.join(f'{b:.9g}' for b in bounds)}" for bounds, names in by_bounds.items()]


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(), metrics_table()))
