"""`python -m planner_svc.simulator`: what `neoflex simulate` runs. Progress goes to standard error."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from planner_svc.simulator.metrics import Metrics
from planner_svc.simulator.runs import POLICIES, find_capacity, run
from planner_svc.simulator.simulation import Progress as Report
from planner_svc.simulator.simulation import StalledError
from planner_svc.simulator.spec import InputError, Profile, read_profile
from planner_svc.simulator.workload import Arrival, read_workload

_INTERRUPTED = 130


def main() -> None:
    """Exit code 2 for what the caller can mend."""
    arguments = _parser().parse_args()
    try:
        profile = read_profile(arguments.spec, arguments.profile)
        arrivals = read_workload(arguments.workload, arguments.limit)
        result = _simulate(arguments, profile, arrivals)
    except (InputError, StalledError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    if arguments.json:
        print(json.dumps({key: value if value != math.inf else None for key, value in result.items()}))
    else:
        Console().print(_table(arguments, len(arrivals), result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="neoflex simulate")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--limit", type=_count, default=None)
    parser.add_argument("--rate", type=_at_least(0), default=1.0)
    parser.add_argument("--policy", choices=POLICIES, default="neoflex")
    parser.add_argument("--find-capacity", type=_at_least(0, 1), default=None)
    parser.add_argument("--json", action="store_true")
    return parser


def _at_least(lowest: float, highest: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not lowest <= value <= highest or math.isinf(value):
            limit = f"at least {lowest:g}" if highest == math.inf else f"from {lowest:g} to {highest:g}"
            raise argparse.ArgumentTypeError(f"must be {limit}, is {text}")
        return value

    return parse


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {text}")
    return value


def _simulate(arguments: argparse.Namespace, profile: Profile, arrivals: Sequence[Arrival]) -> dict[str, object]:
    def measured(rate: float) -> Metrics:
        with _progress(f"{arguments.policy} at {rate:.3g} req/s") as report:
            return run(arguments.policy, profile, arrivals, rate, report)

    rate = arguments.rate
    if arguments.find_capacity is not None:
        share = arguments.find_capacity
        if rate == 0:
            raise InputError("--rate: must be greater than 0 with --find-capacity, is 0")
        rate = find_capacity(lambda tried: measured(tried).slo >= share, rate)
        if rate == 0:
            raise InputError(f"--find-capacity: no rate keeps {share:g} of the requests in time")
    return {"policy": arguments.policy, "profile": profile.name, "rate": rate, **asdict(measured(rate))}


@contextmanager
def _progress(title: str) -> Iterator[Report]:
    """A bar of finished requests, where somebody looks."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def report(num_finished: int, num_arrived: int) -> None:
            bar.update(task, completed=num_finished, total=num_arrived)

        yield report


_LABELS = {
    "slo": "share of requests in time",
    "thr_makespan": "requests/s over the whole run",
    "thr_mid": "requests/s between 30 % and 70 % of completions",
    "pertok_mean": "mean latency / output tokens, s",
    "ttft_p50": "TTFT p50, s",
    "tpot_p50": "TPOT p50, s",
    "gap_p50": "longest gap between two tokens, p50, s",
    "gap_p99": "longest gap between two tokens, p99, s",
    "gap_max": "longest gap between two tokens, s",
    "gpu_busy": "GPU busy, share of the time",
    "cpu_busy": "CPU busy",
    "link_out_busy": "link to the host busy",
    "link_in_busy": "link to the GPU busy",
    "unfinished": "requests not finished",
}


def _table(arguments: argparse.Namespace, num_requests: int, result: dict[str, object]) -> Table:
    title = f"{result['policy']} on {result['profile']}: {num_requests} requests of {arguments.workload.name}"
    table = Table(title=title, show_header=False, box=box.SIMPLE, title_justify="left")
    table.add_row("rate, req/s", f"{result['rate']:.4g}")
    for name, label in _LABELS.items():
        table.add_row(label, f"{result[name]:.4g}")
    return table


if __name__ == "__main__":
    main()
