"""What a stage found, as rows of one table; each is on disk as soon as it is known."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Status(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    NOT_RUN = "NOT RUN"
    MEASURED = "MEASURED"
    ERROR = "ERROR"
    """A measurement that broke off."""


@dataclass(frozen=True)
class Row:
    stage: str
    what: str
    status: Status
    ratio: float | None = None
    ratio_of: str = ""
    """Both sides of the ratio in words."""
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same, and more, for programs; units are in the names."""


class Report:
    """Of one stage, in the process that runs it."""

    def __init__(self, path: Path, stage: str) -> None:
        self._path = path
        self._stage = stage

    def check(self, what: str, passed: bool, detail: str = "", **figures: Any) -> None:
        self._add(what, Status.PASS if passed else Status.FAIL, None, "", detail, figures)

    def figure(self, what: str, detail: str, ratio: float | None = None, ratio_of: str = "", **figures: Any) -> None:
        self._add(what, Status.MEASURED, ratio, ratio_of, detail, figures)

    def not_run(self, what: str, reason: str) -> None:
        self._add(what, Status.NOT_RUN, None, "", reason, {})

    def broke(self, what: str, is_check: bool, detail: str) -> None:
        """It ended with an error."""
        self._add(what, Status.FAIL if is_check else Status.ERROR, None, "", detail, {})

    def _add(
        self, what: str, status: Status, ratio: float | None, ratio_of: str, detail: str, figures: dict[str, Any]
    ) -> None:
        row = Row(self._stage, what, status, ratio, ratio_of, detail, figures)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    """Of a stage's report; what a killed process began to write is left out."""
    return list(_rows(path.read_text().splitlines())) if path.exists() else []


def _rows(lines: Sequence[str]) -> Iterator[Row]:
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        yield Row(**{**values, "status": Status(values["status"])})


def table(rows: Sequence[Row], width: int = 160) -> str:
    """For people, with details broken at `width`."""
    lines, stage = [], ""
    for row in rows:
        if row.stage != stage:
            stage = row.stage
            lines += ["", stage]
        ratio = "" if row.ratio is None else f"{row.ratio:.3g} {row.ratio_of}"
        text = "; ".join(part for part in (ratio, row.detail) if part)
        head = f"  {row.status:8}  {row.what}"
        lines.append(f"{head}: {text}" if text else head)
    return "\n".join(_broken(line, width) for line in lines)


def _broken(line: str, width: int) -> str:
    """Continued lines stand below the text of the first."""
    parts = []
    while len(line) > width:
        cut = line.rfind(" ", 20, width)
        cut = width if cut < 0 else cut
        parts.append(line[:cut])
        line = " " * 14 + line[cut:].lstrip()
    return "\n".join([*parts, line])
