"""Reads what arrives when: workloads and recorded traces of several formats, told apart by their content."""

import csv
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from planner_svc.simulator.spec import InputError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Arrival times are those of one request a second on average; 0 stands for all at once."""
    if rate == 0:
        return [Arrival(0.0, item.prompt_tokens, item.output_tokens) for item in arrivals]
    return [Arrival(item.at_s / rate, item.prompt_tokens, item.output_tokens) for item in arrivals]


def read_workload(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests, arriving at one a second on average. Raises InputError.

    Formats: `[[arrival, prompt, output], ...]`; lengths without times, `[{"prompt", "max_tokens"}, ...]`, which arrive
    as a Poisson process; CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure); JSON lines with timestamp in ms,
    input_length, output_length (Mooncake).
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--workload: {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        arrivals = list(_parse(text, limit))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, csv.Error) as error:
        raise InputError(f"--workload: {path}: not of a known format: {error!r}") from error
    for number, item in enumerate(arrivals):
        if item.prompt_tokens < 1 or item.output_tokens < 1:
            raise InputError(
                f"--workload: {path}: request {number}: prompt and output must be at least 1 token, "
                f"are {item.prompt_tokens} and {item.output_tokens}"
            )
        if not 0 <= item.at_s < math.inf:
            raise InputError(f"--workload: {path}: request {number}: arrival must be at least 0 s, is {item.at_s:g}")
    if not arrivals:
        raise InputError(f"--workload: {path}: holds no request")
    return sorted(arrivals, key=lambda item: item.at_s)


def _parse(text: str, limit: int | None) -> Iterable[Arrival]:
    if text.startswith("TIMESTAMP"):
        return _at_unit_rate(islice(_azure(text), limit))
    if text.lstrip().startswith("{"):
        return _at_unit_rate(islice(_mooncake(text), limit))
    rows = json.loads(text)[:limit]
    if rows and isinstance(rows[0], dict):
        return _poisson([(int(row["prompt"]), int(row["max_tokens"])) for row in rows])
    return [Arrival(float(at_s), int(prompt), int(output)) for at_s, prompt, output in rows]


def _azure(text: str) -> Iterable[Arrival]:
    for row in csv.DictReader(text.splitlines()):
        # Seven digits of a second, one more than Python reads.
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        if int(row["GeneratedTokens"]):
            yield Arrival(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(text: str) -> Iterable[Arrival]:
    for line in text.splitlines():
        row: dict[str, Any] = json.loads(line)
        yield Arrival(row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]))


def _at_unit_rate(recorded: Iterable[Arrival]) -> list[Arrival]:
    """Keeps the gaps' proportions."""
    arrivals = sorted(recorded, key=lambda item: item.at_s)
    span_s = arrivals[-1].at_s - arrivals[0].at_s if arrivals else 0.0
    scale = (len(arrivals) - 1) / span_s if span_s else 0.0
    return [
        Arrival((item.at_s - arrivals[0].at_s) * scale, item.prompt_tokens, item.output_tokens) for item in arrivals
    ]


def _poisson(lengths: list[tuple[int, int]]) -> list[Arrival]:
    generator, at_s, arrivals = random.Random(0), 0.0, []
    for prompt_tokens, output_tokens in lengths:
        arrivals.append(Arrival(at_s, prompt_tokens, output_tokens))
        at_s += generator.expovariate(1.0)
    return arrivals
