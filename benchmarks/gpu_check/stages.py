"""The stages of a run, each in a process of its own that can crash, hang or spoil its device alone.

The parent imports torch once and forks; it never touches the device, so each child makes its own CUDA context.
"""

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from gpu_check import absent, rows
from gpu_check.rows import Report, Row
from gpu_check.setting import Setting

_GRACE_S, _TINY_GRACE_S = 60.0, 300.0
"""To start, compile kernels and make weights, beside the time that a stage is given; a busy CPU needs more of it."""
NO_DEVICE = "torch finds no CUDA device"
"""Why nothing of a run can be done."""
_STRETCH = 2.0
"""What a stage may take, in multiples of that time, before it is ended."""


@dataclass(frozen=True)
class Stage:
    """`module` has `run(setting, report)`."""

    name: str
    module: str
    share: float
    """Of the time of all."""
    is_check: bool = False
    case: str = ""
    """Of those that a module has."""


STAGES = (
    Stage("machine", "machine", 0.02),
    Stage("kernels", "kernels", 0.10, is_check=True),
    Stage("modes", "tokens", 0.06, is_check=True),
    Stage("policies", "policies", 0.04, is_check=True),
    Stage("transformers", "reference", 0.03, is_check=True),
    Stage("launches", "launches", 0.04),
    Stage("loads, Llama-3.1-8B", "loads", 0.13, case="8b"),
    Stage("serving, Llama-3.1-8B", "serving", 0.20, case="8b"),
    Stage("loads, Llama-2-7B", "loads", 0.12, case="7b"),
    Stage("serving, Llama-2-7B", "serving", 0.16, case="7b"),
    Stage("peer", "peer", 0.10),
)


def run_all(setting: Setting, stages: Sequence[Stage], budget_s: float) -> list[Row]:
    """In order; says of each how it went. Stages are cut short rather than the budget exceeded by much."""
    found: list[Row] = []
    started_s = time.monotonic()
    for number, stage in enumerate(stages):
        left_s = budget_s - (time.monotonic() - started_s)
        share = stage.share / sum(each.share for each in stages[number:])
        if left_s <= -_grace_s(setting):
            found += _told(stage, "no time is left, see --budget-s")
            continue
        stage_s = max(left_s, 0.0) * share
        print(f"... {stage.name}", file=sys.stderr, flush=True)
        of_stage = run_one(replace(setting, seconds=stage_s), stage)
        found += of_stage
        if any(row.detail.endswith(NO_DEVICE) for row in of_stage):
            return found
        if stage.module == "kernels" and any(row.status is rows.Status.FAIL for row in of_stage):
            # Once is enough to know; what else works is still to be seen.
            setting = replace(setting, without=(*setting.without, "triton"))
            found.append(Row(stage.name, "from here on", rows.Status.NOT_RUN, detail="Triton's kernels are left out"))
    return found


def _told(stage: Stage, reason: str) -> list[Row]:
    return [Row(stage.name, "all", rows.Status.NOT_RUN, detail=reason)]


def run_one(setting: Setting, stage: Stage) -> list[Row]:
    """Whatever becomes of it."""
    path = setting.scratch / f"{stage.name.replace(' ', '-')}.jsonl"
    report = Report(path, stage.name)
    limit_s = _limit_s(setting)
    process = get_context("fork").Process(target=_run, args=(setting, stage, report))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        _end_group(process)
        report.broke("all", stage.is_check, f"ended by force after {limit_s:.0f} s")
    elif process.exitcode and process.exitcode < 0:
        _end_group(process)
        report.broke("all", stage.is_check, f"ended by {signal.Signals(-process.exitcode).name}")
    elif process.exitcode or not path.exists():
        report.broke("all", stage.is_check, f"ended with {process.exitcode}, see gpu_check.log")
    return rows.read(path)


def _limit_s(setting: Setting) -> float:
    return _STRETCH * setting.seconds + _grace_s(setting)


def _grace_s(setting: Setting) -> float:
    return _TINY_GRACE_S if setting.tiny else _GRACE_S


def _end_group(process: BaseProcess) -> None:
    """With what it started."""
    assert process.pid is not None
    for target in (os.killpg, os.kill):
        try:
            target(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.join()


def _run(setting: Setting, stage: Stage, report: Report) -> None:
    """In the child."""
    os.setsid()
    _redirect(setting.out / "gpu_check.log", stage.name)
    faulthandler.dump_traceback_later(0.95 * _limit_s(setting))  # Where it hangs, before it is ended.
    try:
        for name in setting.without:
            absent.hide(name)
        module = import_module(f"gpu_check.{stage.module}")
        torch.set_num_threads(1)  # Launches are one thread's, and attention on the CPU has its own.
        if stage.case:
            module.run(setting, report, stage.case)
        else:
            module.run(setting, report)
    except Exception as error:
        traceback.print_exc()
        report.broke("all", stage.is_check, _last_line(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _last_line(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def _redirect(log: Path, name: str) -> None:
    """What the stage and its processes print."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    print(f"\n===== {name}", flush=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr, force=True)
