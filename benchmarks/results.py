"""Where every benchmark's figures go: one JSON file and one table in docs/performance.md.

A benchmark measures; it hands its rows to `publish`, which prints the table and, with `--publish`, replaces the
benchmark's own section of the page. Ratios are what a row is about: absolute figures change with the machine.
"""

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "docs" / "performance"


@dataclass(frozen=True)
class Row:
    """One measured thing."""

    measure: str
    ratio: float
    """What the row is judged by."""
    ratio_of: str
    """Both sides of the ratio in words, e.g. "kernel / read ceiling"."""
    target: float | None
    at_least: bool = True
    """Whether the target is a floor of the ratio or its ceiling."""
    detail: str = ""
    """Absolute figures with their units."""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--publish", action="store_true", help="write docs/performance.md and its JSON")
    return parser


def shared_spec() -> Path | None:
    """The simulation spec in shared/simulation, here or in a folder above, where there is one."""
    places = [folder / "shared" / "simulation" / "spec.json" for folder in (ROOT, *ROOT.parents)]
    return next((place for place in places if place.exists()), None)


def publish(
    name: str, title: str, command: str, about: str, rows: Sequence[Row], write: bool, **more: Sequence[object]
) -> None:
    """Prints the rows; with `write`, leaves them in docs/performance/NAME.json and in the page.

    `more` goes into the JSON alone: what the rows were made of.
    """
    table = Table(title=title, box=box.SIMPLE)
    for column in ("measure", "ratio", "of", "target", "detail"):
        table.add_column(column, justify="right" if column in ("ratio", "target") else "left")
    for row in rows:
        table.add_row(row.measure, _ratio(row), row.ratio_of, _target(row), row.detail)
    Console(width=160).print(table)
    if not write:
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    machine = machine_name()
    document: dict[str, object] = {"machine": machine, "command": command, "commit": _commit()}
    document |= {"rows": [asdict(row) for row in rows], **more}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [f"## {title}", "", about, "", f"`{command}`, {machine}, commit {document['commit']}.", ""]
    lines += ["| measure | ratio | of | target | |", "|---|---:|---|---:|---|"]
    lines += [f"| {r.measure} | {_ratio(r)} | {r.ratio_of} | {_target(r)} | {r.detail} |" for r in rows]
    _replace_section(name, "\n".join(lines))


def machine_name() -> str:
    """Processor and its cores, as a reader would name the machine."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


def _ratio(row: Row) -> str:
    mark = {True: "", False: " (missed)", None: ""}[row.met]
    return f"{row.ratio:.3g}{mark}"


def _target(row: Row) -> str:
    return "" if row.target is None else f"{'>=' if row.at_least else '<='} {row.target:g}"


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _replace_section(name: str, text: str) -> None:
    """Between its markers; appended where the page has none yet."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text}\n{end}"
    page = PAGE.read_text() if PAGE.exists() else "# Performance\n"
    if begin in page:
        page = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: section, page, flags=re.S)
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    PAGE.write_text(page)
