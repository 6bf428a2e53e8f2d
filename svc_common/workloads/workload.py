"""Reads what arrives when: workloads and recorded traces of several formats, told apart by their content."""

import csv
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

_LATEST_S = 1e9
"""Some thirty years: later than any record."""


class InputError(Exception):
    """A file or an argument cannot be used. The text names it, the field and the limit."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    class_name: str = ""
    """Of its service class; empty: the default one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, one a second on average."""

    name: str
    arrivals: Sequence[Arrival]
    own_rate: float | None
    """Requests a second of the record; None where it has no times."""
    num_empty: int = 0
    """Rows of the record that are left out because nothing was generated."""


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Arrival times are those of one request a second on average; 0 stands for all at once."""
    return [replace(item, at_s=item.at_s / rate if rate else 0.0) for item in arrivals]


def read_workload(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests of a file, see `load`. Raises InputError."""
    return list(load(path, limit).arrivals)


def load(path: Path, limit: int | None = None) -> Workload:
    """The first `limit` requests, arriving at one a second on average. Raises InputError.

    Formats: `[[arrival, prompt, output], ...]`, whose times are taken as they are; lengths without times,
    `[{"prompt", "max_tokens"}, ...]`, which arrive as a Poisson process; CSV with TIMESTAMP, ContextTokens,
    GeneratedTokens (Azure); JSON lines with timestamp in ms, input_length, output_length (Mooncake). Each may name a
    request's service class: as fourth value, as "class", as a column Class.
    """
    try:
        text = path.read_text("utf-8-sig")  # What spreadsheets write begins with a mark.
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--workload: {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        workload = _parse(path.name, text, limit)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, csv.Error) as error:
        raise InputError(f"--workload: {path}: not of a known format: {error!r}") from error
    for number, item in enumerate(workload.arrivals):
        if item.prompt_tokens < 1 or item.output_tokens < 1:
            raise InputError(
                f"--workload: {path}: request {number}: prompt and output must be at least 1 token, "
                f"are {item.prompt_tokens} and {item.output_tokens}"
            )
        if not 0 <= item.at_s <= _LATEST_S:
            raise InputError(
                f"--workload: {path}: request {number}: arrival must be from 0 to {_LATEST_S:g} s, is {item.at_s:g}"
            )
    if not workload.arrivals:
        raise InputError(f"--workload: {path}: holds no request")
    return replace(workload, arrivals=sorted(workload.arrivals, key=lambda item: item.at_s))


def _parse(name: str, text: str, limit: int | None) -> Workload:
    if text.startswith("TIMESTAMP"):
        return _recorded(name, _azure(text), limit)
    if text.lstrip().startswith("{"):
        return _recorded(name, _mooncake(text), limit)
    rows = json.loads(text)[:limit]
    if rows and isinstance(rows[0], dict):
        items = [Arrival(0.0, int(row["prompt"]), int(row["max_tokens"]), _class_name(row)) for row in rows]
        return Workload(name, _poisson(items), None)
    return Workload(name, [_row(*row) for row in rows], 1.0)


def _row(at_s: float, prompt: int, output: int, class_name: str = "") -> Arrival:
    return Arrival(float(at_s), int(prompt), int(output), _class_name({"class": class_name}))


def _class_name(row: Mapping[str, Any], key: str = "class") -> str:
    """Raises TypeError for what is no name."""
    name = row.get(key) or ""
    if not isinstance(name, str):
        raise TypeError(f"{key} must be a name, is {name!r}")
    return name


def _azure(text: str) -> Iterable[Arrival]:
    for row in csv.DictReader(text.splitlines()):
        # Seven digits of a second, one more than Python reads.
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Arrival(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), _class_name(row, "Class"))


def _mooncake(text: str) -> Iterable[Arrival]:
    for line in filter(str.strip, text.splitlines()):
        row: dict[str, Any] = json.loads(line)
        yield Arrival(row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), _class_name(row))


def _recorded(name: str, recorded: Iterable[Arrival], limit: int | None) -> Workload:
    """The first `limit` that generated something; keeps the gaps' proportions."""
    kept: list[Arrival] = []
    num_empty = 0
    for item in recorded:
        if len(kept) == limit:
            break
        if item.output_tokens:
            kept.append(item)
        else:
            num_empty += 1
    kept.sort(key=lambda item: item.at_s)
    span_s = kept[-1].at_s - kept[0].at_s if kept else 0.0
    own_rate = (len(kept) - 1) / span_s if span_s else None
    arrivals = [replace(item, at_s=(item.at_s - kept[0].at_s) * (own_rate or 0.0)) for item in kept]
    return Workload(name, arrivals, own_rate, num_empty)


def _poisson(items: Iterable[Arrival]) -> list[Arrival]:
    generator, at_s, arrivals = random.Random(0), 0.0, []
    for item in items:
        arrivals.append(replace(item, at_s=at_s))
        at_s += generator.expovariate(1.0)
    return arrivals
