"""What ran when in an iteration: steps of both processes by the executor's recorder, kernels by torch's profiler."""

from collections.abc import Callable
from pathlib import Path

import torch

from gpu_check.cases import MODE_NAMES
from gpu_check.rig import Load, Rig
from gpu_check.rows import Report
from gpu_check.setting import Setting
from neoflex.trace.summary import summarize
from svc_common.plan import Mode
from svc_common.trace import IterationTrace

_TRACED = 4
"""Iterations of a mode."""


def timelines(report: Report, rig: Rig, mode: Mode, load: Load) -> list[IterationTrace]:
    """Of some iterations, and what they say of where the time goes."""
    results = [rig.run(mode, load, trace=True) for _ in range(_TRACED)]
    rig.end_step(load)
    traces = [result.trace for result in results if result.trace is not None]
    summary = summarize(traces)
    hop = f", hop of a layer {summary.hop_p50_ns / 1e3:.0f} us" if summary.hop_p50_ns else ""
    cpu_waits = sum(waits for _, waits in summary.services.values())  # There is one service, or none.
    detail = f"the executor waits {summary.gpu_bubble_share:.0%}, the CPU {cpu_waits:.0%}, "
    detail += f"both work {summary.both_busy_share:.0%}{hop}; on cuda these are times of launches"
    report.figure(f"where it goes, {MODE_NAMES[mode.value]}", detail, hop_s=summary.hop_p50_ns / 1e9)
    return traces


def profile_kernels(setting: Setting, report: Report, name: str, rig: Rig, mode: Mode, load: Load) -> None:
    """Kernels and copies as the GPU ran them, by torch's profiler."""
    path = setting.out / f"kernels-{name}.json.gz"
    try:
        _profiled(lambda: rig.run(mode, load), path)
    except Exception as error:  # Containers may not let anybody profile.
        report.not_run("timelines of kernels", f"{type(error).__name__}: {error}")
        return
    report.figure("timelines of kernels", f"{path}, two iterations, {MODE_NAMES[mode.value]}")


def _profiled(run_once: Callable[[], object], path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_once()
        run_once()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
