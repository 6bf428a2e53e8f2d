"""What the machine is and what it can do at best: the figures that all others are to be read against."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_check import absent
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_check.stages import NO_DEVICE

_RUNS = 5


def run(setting: Setting, report: Report) -> None:
    report.figure("processor", _processor())
    _cpu_reads(setting, report)
    if not setting.on_cuda:
        return
    if not torch.cuda.is_available():
        raise RuntimeError(NO_DEVICE)
    properties = torch.cuda.get_device_properties(setting.device)
    facts: dict[str, Any] = {
        "name": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(setting.device))),
        "memory_bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }
    detail = f"{facts['name']}, {properties.total_memory / 1e9:.1f} GB, capability {facts['capability']}"
    report.figure("GPU", f"{detail}, CUDA {facts['cuda']}, driver {facts['driver']}", **facts)
    _copies(setting, report)
    _products(setting, report)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.split("\n")[0].strip()


def _cpu_reads(setting: Setting, report: Report) -> None:
    """What attention on the CPU can't be faster than."""
    if reason := absent.lacking(absent.EXTENSION_MODULES[0]):
        report.not_run("memory bandwidth of the CPU", reason)
        return
    from svc_common.cores import usable_cores
    from svc_common.cpu_kernels import ThreadPool, read_ceiling

    num_threads = 1 if setting.tiny else max(1, usable_cores() - 2)
    memory = np.ones(2**24 if setting.tiny else 2**30, np.uint8)
    bytes_per_s = read_ceiling(ThreadPool(num_threads, []), memory, _RUNS)
    what = "memory bandwidth of the CPU"
    report.figure(what, f"{bytes_per_s / 1e9:.1f} GB/s read by {num_threads} threads", bytes_per_s=bytes_per_s)


def _copies(setting: Setting, report: Report) -> None:
    num_bytes = 2**28
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.zeros(num_bytes, dtype=torch.uint8, device=setting.device) for _ in range(2))
    for what, copy, factor in (
        ("link to the device", lambda: here.copy_(host, non_blocking=True), 1),
        ("link to the host", lambda: host.copy_(here, non_blocking=True), 1),
        ("memory bandwidth of the GPU", lambda: there.copy_(here), 2),
    ):
        bytes_per_s = factor * num_bytes / _seconds(copy)
        report.figure(what, f"{bytes_per_s / 1e9:.1f} GB/s", bytes_per_s=bytes_per_s)


def _products(setting: Setting, report: Report) -> None:
    from gpu_check.model import sixteen_bits

    size, dtype = 8192, sixteen_bits(setting.device)
    a, b = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
    flops = 2 * size**3 / _seconds(lambda: a @ b)
    report.figure("matrix products", f"{flops / 1e12:.0f} TFLOP/s in {dtype}", flops_per_s=flops)


def _seconds(run_once: Callable[[], object]) -> float:
    """The median of some runs, after one that does not count."""
    times = []
    for _ in range(_RUNS + 1):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        run_once()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])
