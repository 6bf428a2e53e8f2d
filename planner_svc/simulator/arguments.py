"""The options of `neoflex simulate`, checked; what is wrong with one is said with its name and its limit."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from planner_svc.simulator.runs import POLICIES, TOLERANCE
from planner_svc.simulator.spec import read_spec
from planner_svc.simulator.study import Case, Changes, Search, Task
from svc_common.workloads import InputError

_LOWEST_RATE, _HIGHEST_RATE = 1e-6, 1e6
_MOST_POINTS = 1000
_MOST_JOBS = 1024
_MOST_THREADS = 1024
_ABOUT = """\
The scheduler that serves, on a machine and a workload that exist on paper only; docs/simulate.md explains the files.
Several values of --profile, --set, --policy or --rate, separated by commas, give one row for each combination.
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second, or times the rate of the record."""

    value: float
    is_relative: bool = False

    def resolve(self, own_rate: float | None) -> float:
        """Raises InputError where the workload has no rate of its own."""
        if not self.is_relative:
            return self.value
        if own_rate is None:
            raise InputError(f"--rate {self.value:g}x: the workload has no recorded times; give requests per second")
        return self.value * own_rate


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Ends the process with exit code 2 for a bad option."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "neoflex simulate", description=_ABOUT, formatter_class=formatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--spec", type=Path, required=True, metavar="FILE", help="JSON file of machine profiles and models")
    add("--profile", type=_names(), required=True, metavar="P[,P]", help="which machines of it; all")
    add("--workload", required=True, metavar="W", help="a file, a recorded trace, or e.g. poisson:prompt=500,output=50")
    add("--classes", type=Path, metavar="FILE", help="service classes: a server's TOML file, [planner.classes.NAME]")
    add("--requests", type=_whole(1), metavar="N", help="only the first N requests")
    rates = "requests per second: R, R,R,... or FROM:TO:POINTS; 2x: twice the recorded rate; 0: all at once (default 1)"
    add("--rate", "--rates", type=_rates, metavar="R", dest="rates", default=(Rate(1.0),), help=rates)
    add("--policy", type=_names(POLICIES), default=("neoflex",), metavar="P[,P]", help=f"all, {', '.join(POLICIES)}")
    add("--set", type=_change, action="append", default=[], metavar="KEY=V[,V]", help="replace a figure of the spec")
    share = "search the highest rate at which this share of the requests is in time, from --rate"
    add("--find-capacity", type=_number(0, 1), metavar="SHARE", help=share)
    add("--tolerance", type=_number(1e-4, 0.5), metavar="T", help=f"of the rate found (default {TOLERANCE:g})")
    elastic = "let threads of attention on the CPU follow the load between these; the figures of the spec are of MOST"
    add("--elastic", type=_threads, metavar="LEAST:MOST", help=elastic)
    add("--jobs", type=_whole(1, _MOST_JOBS), default=1, metavar="N", help="run so many at once, a process each")
    add("--json", action="store_true", help="print one JSON object a line for each run")
    add("--png", type=Path, metavar="FILE", help="draw curves over the rates, or the capacities")
    add("--trace", type=Path, metavar="FILE", help="write the iterations of a single run for ui.perfetto.dev")
    options = parser.parse_args(arguments)
    try:
        _check(options)
    except InputError as error:
        parser.error(str(error))
    return options


def tasks(options: argparse.Namespace, own_rate: float | None) -> list[Task]:
    """One for each row. Raises InputError."""
    spec = read_spec(options.spec)
    names = spec.names if options.profile == ("all",) else options.profile
    policies = POLICIES if options.policy == ("all",) else options.policy
    variants = [tuple(changes) for changes in product(*_choices(options.set))]
    cases = [
        Case(spec.profile(name, dict(changes)), changes, policy, options.elastic)
        for name in names
        for changes in variants
        for policy in policies
    ]
    rates = [rate.resolve(own_rate) for rate in options.rates]
    if options.find_capacity is None:
        return [Task(case, rate) for case in cases for rate in rates]
    tolerance = options.tolerance or TOLERANCE
    return [Task(case, Search(options.find_capacity, rates[0], tolerance)) for case in cases]


def _choices(changes: Sequence[tuple[str, tuple[float, ...]]]) -> list[Changes]:
    return [tuple((key, value) for value in values) for key, values in changes]


def _check(options: argparse.Namespace) -> None:
    """What one option alone can't tell."""
    if options.find_capacity is not None:
        if len(options.rates) > 1:
            raise InputError("argument --rate: with --find-capacity it is where the search begins: give one")
        if options.rates[0].value == 0:
            raise InputError("argument --rate: must be greater than 0 with --find-capacity, is 0")
    elif options.tolerance is not None:
        raise InputError("argument --tolerance: only with --find-capacity")
    elif options.png is not None and len(options.rates) < 2:
        raise InputError("argument --png: curves need at least 2 rates, see --rate, or --find-capacity")
    if options.elastic is not None and options.policy != ("neoflex",):
        raise InputError("argument --elastic: only with the policy neoflex, which alone changes threads")
    keys = [key for key, _ in options.set]
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(f"argument --set: {key} is given more than once")
    for option, path in (("--png", options.png), ("--trace", options.trace)):
        if path is not None:
            _check_writable(path, option)


def _check_writable(path: Path, option: str) -> None:
    """Before anything is computed."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InputError(f"argument {option}: cannot write {path}: {error.strerror}") from error
    if not existed:
        path.unlink()


def _number(lowest: float, highest: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, is {text!r}") from None
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be from {lowest:g} to {highest:g}, is {text}")
        return value

    return convert


def _whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, is {text!r}") from None
        if value < lowest or (highest is not None and value > highest):
            limit = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"
            raise argparse.ArgumentTypeError(f"must be {limit}, is {text}")
        return value

    return convert


def _threads(text: str) -> tuple[int, int]:
    least_text, separator, most_text = text.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be LEAST:MOST, is {text!r}")
    least, most = _whole(1, _MOST_THREADS)(least_text), _whole(1, _MOST_THREADS)(most_text)
    if least > most:
        raise argparse.ArgumentTypeError(f"the least, {least}, is above the most, {most}")
    return least, most


def _names(known: Sequence[str] | None = None) -> Callable[[str], tuple[str, ...]]:
    """Separated by commas, each once; all of them by `all` alone."""

    def convert(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"names one more than once: {text!r}")
        for name in names:
            if not name or (known is not None and name not in known and text != "all"):
                expected = f"one of all, {', '.join(known)}" if known else "names separated by commas"
                raise argparse.ArgumentTypeError(f"must be {expected}, is {name!r}")
        return names

    return convert


def _rates(text: str) -> tuple[Rate, ...]:
    if ":" not in text:
        rates = tuple(_rate(item) for item in text.split(","))
        if len(set(rates)) < len(rates):
            raise argparse.ArgumentTypeError(f"names one more than once: {text!r}")
        return rates
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"must be FROM:TO:POINTS, is {text!r}")
    first, last = _rate(parts[0]), _rate(parts[1])
    points = _whole(2, _MOST_POINTS)(parts[2])
    if first.is_relative is not last.is_relative or not first.value < last.value:
        raise argparse.ArgumentTypeError(f"must rise, both ends in the same unit, is {text!r}")
    step = (last.value - first.value) / (points - 1)
    return tuple(Rate(first.value + step * place, first.is_relative) for place in range(points))


def _rate(text: str) -> Rate:
    is_relative = text.endswith("x")
    value = _number(0, _HIGHEST_RATE)(text.removesuffix("x"))
    if 0 < value < _LOWEST_RATE:
        raise argparse.ArgumentTypeError(f"must be 0 or at least {_LOWEST_RATE:g}, is {text}")
    return Rate(value, is_relative)


def _change(text: str) -> tuple[str, tuple[float, ...]]:
    key, separator, values = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE[,VALUE], is {text!r}")
    return key, tuple(_number(-math.inf, math.inf)(value) for value in values.split(","))
