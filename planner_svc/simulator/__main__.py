"""`python -m planner_svc.simulator`: what `neoflex simulate` runs. Answers go to standard output, progress to error."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from planner_svc.classes import ServiceClasses
from planner_svc.simulator import iterations, report
from planner_svc.simulator.arguments import parse, tasks
from planner_svc.simulator.classes import check_names, one_class, read_classes
from planner_svc.simulator.simulation import Progress as Report
from planner_svc.simulator.study import Outcome, Task, Titled, solve, solve_beside
from svc_common import workloads
from svc_common.workloads import InputError, Workload

_INTERRUPTED = 130
_PIPED_WIDTH = 220
"""Of a table that no terminal bounds."""


def main() -> None:
    """Exit code 2 for what the caller can mend."""
    options = parse()
    try:
        _answer(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


def _answer(options: argparse.Namespace) -> None:
    load = workloads.read(options.workload, options.requests)
    rows = tasks(options, load.own_rate)
    classes = read_classes(options.classes) if options.classes else None
    check_names(load.arrivals, classes or one_class(None))
    if options.trace is not None and len(rows) > 1:
        raise InputError(f"--trace: needs a single run, these are {len(rows)}")
    outcomes = []
    for outcome in _solved(options, rows, load, classes):
        outcomes.append(outcome)
        if options.json:
            print(json.dumps(report.to_json(outcome, load)), flush=True)
    if not options.json:
        console = Console()
        console = console if console.is_terminal else Console(width=_PIPED_WIDTH)
        console.print(*report.tables(outcomes, load))
        if classes:
            console.print(report.classes_table(outcomes))
    if options.png is not None:
        _draw(options, outcomes, load)


def _solved(
    options: argparse.Namespace, rows: list[Task], load: Workload, classes: ServiceClasses | None
) -> Iterator[Outcome]:
    """In the order of the rows."""
    if options.jobs > 1 and len(rows) > 1:
        with _bar(options.json) as bar:
            task = bar.add_task(f"{len(rows)} runs", total=len(rows))
            for outcome in solve_beside(rows, load.arrivals, options.jobs, classes):
                bar.advance(task)
                yield outcome
        return
    with _bar(options.json) as bar:
        for number, row in enumerate(rows, 1):
            place = f" ({number} of {len(rows)})" if len(rows) > 1 else ""
            traced = iterations.writing(options.trace, row.case.label) if options.trace else nullcontext()
            with traced as observer:
                yield solve(row, load.arrivals, _titled(bar, place), observer, classes)


def _titled(bar: Progress, place: str) -> Titled:
    """One run at a time: each takes the place of the one before."""

    def begin(title: str) -> Report:
        for task in bar.task_ids:
            bar.remove_task(task)
        task = bar.add_task(title + place, total=None)
        return lambda done, total: bar.update(task, completed=done, total=total)

    return begin


@contextmanager
def _bar(is_silent: bool) -> Iterator[Progress]:
    """Of finished requests or runs, where somebody looks."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=is_silent or not console.is_terminal) as bar:
        yield bar


def _draw(options: argparse.Namespace, outcomes: list[Outcome], load: Workload) -> None:
    from planner_svc.simulator import plot  # matplotlib takes a second to import.

    what = f"{len(load.arrivals)} requests of {load.name}"
    if options.find_capacity is None:
        plot.draw_curves(outcomes, what, options.png)
    else:
        title = f"highest rate with {options.find_capacity:g} of the requests in time: {what}"
        plot.draw_capacities(outcomes, title, options.png)


if __name__ == "__main__":
    main()
