"""What computes, and the memory that it computes in: GPU, cores, kernels, weights and KV."""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from neoflex.doctor.finding import Finding, Level
from svc_common.config import Config
from svc_common.cores import usable_cores
from svc_common.cpu_kernels import choose_instruction_set
from svc_common.memory import machine_bytes, size_text, usable_memory_bytes
from svc_common.model.read_spec import read_spec
from svc_common.model.shapes import find_model
from svc_common.model.spec import UnsupportedModelError
from svc_common.model.store import ModelNotFoundError

_DTYPE_BYTES = {"auto": 4.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.05, "int4": 0.65}
"""Of a weight, scales included; what "auto" comes to is measured at start-up."""
_SLOW_KERNELS = ("scalar", "avx2")
_GPU_QUERY_S = 10.0
_GIB = 2**30


def gpu(config: Config, name: str | None) -> Finding:
    if name is None and config.gpu.device == "cuda":
        advice = 'gpu.device is "cuda": install the driver, give the container the GPU, or set "auto"'
        return Finding(Level.PROBLEM, "GPU", "nvidia-smi finds none", advice)
    if name is None:
        return Finding(Level.OK, "GPU", "none: the CPU plays it, in a process of its own")
    if config.gpu.device == "cpu":
        return Finding(Level.NOTE, "GPU", name, 'gpu.device is "cpu": the GPU stays idle; "auto" takes it')
    return Finding(Level.OK, "GPU", name)


def gpu_name() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_GPU_QUERY_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") or None


def model(config: Config, root: Path) -> Iterator[Finding]:
    try:
        files = find_model(config.model.source, config.model.load_format)
    except ModelNotFoundError as error:
        yield Finding(Level.PROBLEM, "model", config.model.source, str(error))
    else:
        yield Finding(Level.OK, "model", files.name)


def processor(config: Config, root: Path) -> Iterator[Finding]:
    for index, service in enumerate(config.cpu_attn):
        try:
            kernel = choose_instruction_set(service.instruction_set)
        except ValueError as error:
            advice = f"{config.cpu_attn_key(index)}.instruction_set: {error}"
            yield Finding(Level.PROBLEM, "CPU kernels", platform.machine(), advice)
            return
    slow = kernel in _SLOW_KERNELS
    advice = "attention on the CPU gains from a processor with AVX-512 or NEON" if slow else ""
    yield Finding(Level.NOTE if slow else Level.OK, "CPU kernels", kernel, advice)


def cores(config: Config, root: Path) -> Iterator[Finding]:
    cores, here = usable_cores(), os.cpu_count() or 1
    wanted = config.gpu.num_threads + sum(service.num_threads for service in config.cpu_attn_services)
    found = f"{cores} of {here}" if cores < here else str(cores)
    if wanted > cores:
        advice = f"gpu.num_threads and cpu_attn.num_threads are {wanted} together: one too many slows all down"
        yield Finding(Level.PROBLEM, "cores", found, advice)
    elif cores < here:
        yield Finding(Level.NOTE, "cores", found, "affinity or the cgroup's quota keeps the others from this process")
    else:
        yield Finding(Level.OK, "cores", found)


def memory(config: Config, plays_gpu: bool, root: Path) -> Finding:
    """`plays_gpu`: the GPU's weights and KV lie in this memory, too."""
    usable, here = usable_memory_bytes(), machine_bytes(root / "proc/meminfo")
    wanted = {"cpu_attn.kv_bytes": _host_bytes(config)}
    weights = 0
    if plays_gpu:
        weights = _weight_bytes(config)
        wanted["gpu.kv_bytes"] = _device_kv_bytes(config, weights)
    total = sum(wanted.values()) + weights
    limited = f", the limit of this cgroup; the machine has {size_text(here)}" if usable < here else ""
    found = f"{size_text(usable)} to use{limited}; asked: KV {size_text(total - weights)}"
    if weights:
        found += f", weights up to {size_text(weights)}"
    if plays_gpu and config.gpu.kv_bytes == "auto" and config.gpu.memory_bytes is None:
        advice = 'gpu.kv_bytes "auto" needs gpu.memory_bytes: a CPU that plays the GPU shares its memory with all'
        return Finding(Level.PROBLEM, "memory", found, advice)
    if total > usable:
        advice = f"lower {' or '.join(wanted)}, choose smaller weights (gpu.dtype), or raise the container's limit"
        return Finding(Level.PROBLEM, "memory", found, advice)
    return Finding(Level.OK, "memory", found)


def _device_kv_bytes(config: Config, weight_bytes: int) -> int:
    """At most: "auto" takes what weights leave of gpu.memory_bytes."""
    if config.gpu.kv_bytes != "auto":
        return int(config.gpu.kv_bytes)
    return max(0, (config.gpu.memory_bytes or 0) - weight_bytes)


def _weight_bytes(config: Config) -> int:
    """In the largest type that gpu.dtype may come to; 0 where the model can't be read, which is said elsewhere."""
    try:
        spec = read_spec(find_model(config.model.source, config.model.load_format))
    except (ModelNotFoundError, UnsupportedModelError):
        return 0
    return min(round(spec.num_parameters * _DTYPE_BYTES[config.gpu.dtype]), config.gpu.memory_bytes or sys.maxsize)


def _host_bytes(config: Config) -> int:
    return sum(service.kv_bytes for service in config.cpu_attn_services)


def locked_memory(config: Config) -> Finding:
    """The GPU's driver locks the host pool."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding(Level.OK, "locked memory", "unlimited")
    found = f"{limit / _GIB:.2f} GiB"
    if limit >= _host_bytes(config):
        return Finding(Level.OK, "locked memory", found)
    advice = "ulimit -l unlimited (compose: ulimits: memlock: -1), where the driver counts pinned memory"
    return Finding(Level.NOTE, "locked memory", found, advice)
