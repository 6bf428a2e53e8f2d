"""What policy_check.py measured, kept and set against predictions."""

import json
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from results import Row

from neoflex.v1 import executor_pb2
from planner_svc.estimator import OperationTables
from planner_svc.policy import PolicyEstimator, RequestMix
from planner_svc.wire import tables_from_message
from svc_common.policy import ExecutionPolicy

_ERROR, _NEAR_BEST, _SHARE_NEAR = 0.20, 1.10, 0.90
_OF_ERRORS = "|predicted / measured - 1|"


@dataclass(frozen=True)
class Cell:
    """One policy, batch and prompt length."""

    policy: str
    mix: RequestMix
    runs: tuple[tuple[float, float], ...]
    """(TTFT, TPOT) of each; the first is for calibration, the others count."""

    @property
    def first(self) -> tuple[float, float]:
        return self.runs[0]

    @property
    def times(self) -> tuple[float, float]:
        """Medians of those that count."""
        ttft_s, tpot_s = (statistics.median(times) for times in zip(*self.runs[1:], strict=True))
        return ttft_s, tpot_s

    @property
    def total_s(self) -> float:
        return _total_s(self.mix, self.times)


def _total_s(mix: RequestMix, times: tuple[float, float]) -> float:
    """Of TTFT and TPOT."""
    return times[0] + mix.num_decode_iterations * times[1]


class Calibrated:
    """Predictions, and what first runs say they must be multiplied by: a factor for each policy and phase."""

    def __init__(self, cells: list[Cell], policies: Mapping[str, ExecutionPolicy], estimator: PolicyEstimator) -> None:
        self.plain: dict[tuple[str, RequestMix], tuple[float, float]] = {}
        """(TTFT, TPOT) of a policy and a mix."""
        for cell in cells:
            found = estimator.predict(policies[cell.policy], cell.mix)
            self.plain[cell.policy, cell.mix] = found.ttft_s, found.tpot_s
        self._factors = {name: self._factor(cells, name) for name in {cell.policy for cell in cells}}

    def _factor(self, cells: list[Cell], name: str) -> tuple[float, float]:
        own = [cell for cell in cells if cell.policy == name]
        ttft, tpot = (
            statistics.median(cell.first[phase] / self.plain[name, cell.mix][phase] for cell in own) for phase in (0, 1)
        )
        return ttft, tpot

    def __call__(self, policy: str, mix: RequestMix) -> tuple[float, float]:
        (ttft_s, tpot_s), (ttft, tpot) = self.plain[policy, mix], self._factors[policy]
        return ttft * ttft_s, tpot * tpot_s


def rows(cells: list[Cell], predicted: Calibrated, fitting: Collection[str]) -> Iterator[Row]:
    """Of each cell, of all, and of the choice."""
    plain, errors = [], []
    for cell in cells:
        before, after = predicted.plain[cell.policy, cell.mix], predicted(cell.policy, cell.mix)
        real = cell.times
        plain += [abs(time_s / real_s - 1) for time_s, real_s in zip(before, real, strict=True)]
        own = [abs(time_s / real_s - 1) for time_s, real_s in zip(after, real, strict=True)]
        errors += own
        where = f"{cell.policy}, batch {cell.mix.num_sequences}, {cell.mix.prompt_tokens} in"
        detail = (
            f"TTFT {real[0] * 1e3:.0f} ms, predicted {before[0] * 1e3:.0f}, calibrated {after[0] * 1e3:.0f}; "
            f"TPOT {real[1] * 1e3:.1f}, {before[1] * 1e3:.1f}, {after[1] * 1e3:.1f}"
        )
        yield Row(where, statistics.mean(own), _OF_ERRORS, None, False, detail)
    yield Row("all: mean absolute error, from the tables alone", statistics.mean(plain), _OF_ERRORS, None, False)
    yield Row("all: mean absolute error", statistics.mean(errors), _OF_ERRORS, _ERROR, False)
    choices = [cell for cell in cells if cell.policy in fitting]
    yield _choice(choices, lambda cell: predicted.plain[cell.policy, cell.mix], ", from the tables alone,")
    yield _choice(choices, lambda cell: predicted(cell.policy, cell.mix), "")


def _choice(cells: list[Cell], times: Callable[[Cell], tuple[float, float]], by: str) -> Row:
    """How often what is predicted to be soonest is, or nearly."""
    near, missed = [], []
    for mix in dict.fromkeys(cell.mix for cell in cells):
        group = [cell for cell in cells if cell.mix == mix]
        chosen = min(group, key=lambda cell: _total_s(mix, times(cell)))
        best = min(group, key=lambda cell: cell.total_s)
        near.append(chosen.total_s <= _NEAR_BEST * best.total_s)
        if not near[-1]:
            where = f"batch {mix.num_sequences}, {mix.prompt_tokens} in"
            missed.append(f"{where}: {chosen.policy} {chosen.total_s:.2f} s, {best.policy} {best.total_s:.2f}")
    detail = "; ".join([f"{len(near)} cells", *missed])
    return Row(
        f"the choice{by} is the best, or within 10 % of it", statistics.mean(near), "cells", _SHARE_NEAR, detail=detail
    )


class Kept:
    """What was measured, in a file: policies may be measured one run at a time."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """`facts`: under which the cells hold; those of others are forgotten."""
        self._path, self._facts = path, facts
        document = json.loads(path.read_text()) if path.exists() else {}
        here = document if document.get("facts") == facts else {}
        self._tables: dict[str, Any] | None = here.get("tables")
        self.cells = [
            Cell(item["policy"], RequestMix(**item["mix"]), tuple((ttft_s, tpot_s) for ttft_s, tpot_s in item["runs"]))
            for item in here.get("cells", ())
        ]

    @property
    def tables(self) -> OperationTables | None:
        if self._tables is None:
            return None
        return tables_from_message(json_format.ParseDict(self._tables, executor_pb2.OperationTables()))

    def add(self, name: str, cells: list[Cell], tables: dict[str, Any] | None) -> None:
        """In the place of the policy's earlier ones."""
        self.cells = [cell for cell in self.cells if cell.policy != name] + cells
        self._tables = tables or self._tables
        document = {"facts": self._facts, "tables": self._tables, "cells": [asdict(cell) for cell in self.cells]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(document))
