"""Looks at this machine as the services will find it, and says what to change. Reads only; starts nothing."""

import os
import platform
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from neoflex.placement import shared_address
from svc_common.cgroups import limiting_directories
from svc_common.config import Config, ConfigError, GatewayConfig, PlannerConfig
from svc_common.cores import usable_cores
from svc_common.cpu_kernels import choose_instruction_set
from svc_common.memory import machine_bytes, size_text, usable_memory_bytes
from svc_common.model.read_spec import read_spec
from svc_common.model.shapes import find_model
from svc_common.model.spec import UnsupportedModelError
from svc_common.model.store import ModelNotFoundError, default_cache_dir
from svc_common.security.api_keys import first_key
from svc_common.security.exposure import exposure
from svc_common.security.tls import TlsFiles

_FEW_FILES = 4096
"""Open files: a connection takes one in planner and gateway each."""
_FEW_TASKS = 512
_DTYPE_BYTES = {"auto": 4.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.05, "int4": 0.65}
"""Of a weight, scales included; what "auto" comes to is measured at start-up."""
_SLOW_KERNELS = ("scalar", "avx2")
_FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")
_GPU_QUERY_S = 10.0
_GIB = 2**30


class Level(Enum):
    OK = "ok"
    NOTE = "note"
    """It runs, slower or less than it could."""
    PROBLEM = "problem"
    """It will not start, or not do what the configuration says."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    topic: str
    found: str
    advice: str = ""


def examine(config: Config, root: Path = Path("/")) -> Iterator[Finding]:
    """Every finding, the good ones too. `root` is where /proc, /sys and the like are read."""
    gpu = _gpu_name()
    yield _gpu(config, gpu)
    yield _memory(config, gpu is None and config.gpu.device != "cuda", root)
    for check in _CHECKS:
        yield from check(config, root)
    if gpu is not None:
        yield _locked_memory(config)


def _gpu(config: Config, name: str | None) -> Finding:
    if name is None and config.gpu.device == "cuda":
        advice = 'gpu.device is "cuda": install the driver, give the container the GPU, or set "auto"'
        return Finding(Level.PROBLEM, "GPU", "nvidia-smi finds none", advice)
    if name is None:
        return Finding(Level.OK, "GPU", "none: the CPU plays it, in a process of its own")
    if config.gpu.device == "cpu":
        return Finding(Level.NOTE, "GPU", name, 'gpu.device is "cpu": the GPU stays idle; "auto" takes it')
    return Finding(Level.OK, "GPU", name)


def _gpu_name() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_GPU_QUERY_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") or None


def _model(config: Config, root: Path) -> Iterator[Finding]:
    try:
        files = find_model(config.model.source, config.model.load_format)
    except ModelNotFoundError as error:
        yield Finding(Level.PROBLEM, "model", config.model.source, str(error))
    else:
        yield Finding(Level.OK, "model", files.name)


def _processor(config: Config, root: Path) -> Iterator[Finding]:
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


def _cores(config: Config, root: Path) -> Iterator[Finding]:
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


def _memory(config: Config, plays_gpu: bool, root: Path) -> Finding:
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


def _segment(config: Config, root: Path) -> Iterator[Finding]:
    """Pools in one directory share its room."""
    wanted: dict[Path, int] = {}
    for service in config.cpu_attn_services:
        wanted[service.segment_dir] = wanted.get(service.segment_dir, 0) + service.kv_bytes
    for directory, num_bytes in wanted.items():
        yield _shared_memory(directory, num_bytes, root)


def _shared_memory(directory: Path, num_bytes: int, root: Path) -> Finding:
    try:
        status = os.statvfs(root / directory.relative_to("/") if directory.is_absolute() else directory)
    except OSError as error:
        return Finding(Level.PROBLEM, "shared memory", str(directory), f"cpu_attn.segment_dir: {error.strerror}")
    free = status.f_bavail * status.f_frsize
    found = f"{directory}: {free / _GIB:.2f} GiB free, cpu_attn.kv_bytes {num_bytes / _GIB:.2f} GiB"
    if num_bytes <= free:
        return Finding(Level.OK, "shared memory", found)
    advice = "raise --shm-size (compose: shm_size), mount a larger tmpfs, or name another cpu_attn.segment_dir"
    return Finding(Level.PROBLEM, "shared memory", found, advice)


def _huge_pages(config: Config, root: Path) -> Iterator[Finding]:
    path = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = _read(root / path)
    setting = text.partition("[")[2].partition("]")[0] if "[" in text else ""
    if setting in ("always", "advise", "within_size", "force"):
        yield Finding(Level.OK, "huge pages", f"shared memory: {setting}")
    else:
        advice = f"as root: echo advise > /{path}; attention then looks up fewer addresses"
        yield Finding(Level.NOTE, "huge pages", f"shared memory: {setting or 'not known'}", advice)


def _numa(config: Config, root: Path) -> Iterator[Finding]:
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if nodes > len(config.cpu_attn):
        advice = "run one CPU attention service per node: a pool on the other node is read at half the speed"
        yield Finding(Level.NOTE, "NUMA nodes", str(nodes), advice)
    else:
        yield Finding(Level.OK, "NUMA nodes", str(max(1, nodes)))


def _clock(config: Config, root: Path) -> Iterator[Finding]:
    source = _read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in _FAST_CLOCKS:
        yield Finding(Level.OK, "clock", source)
    else:
        advice = "reading the time may cost a system call; prefer tsc where the machine has it"
        yield Finding(Level.NOTE, "clock", source or "not known", advice)


def _governor(config: Config, root: Path) -> Iterator[Finding]:
    governor = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave":
        yield Finding(Level.NOTE, "CPU frequency", governor, "as root: cpupower frequency-set -g performance")
    elif governor:
        yield Finding(Level.OK, "CPU frequency", governor)


def _addresses(config: Config, root: Path) -> Iterator[Finding]:
    """Of the services that this configuration starts."""
    if complaint := shared_address(config):
        yield Finding(Level.PROBLEM, "addresses", "not all different", complaint)
        return
    yield Finding(Level.OK, "addresses", "all different")


def _cache(config: Config, root: Path) -> Iterator[Finding]:
    """Models, layer files and measurements are kept there."""
    try:
        directory = default_cache_dir()
    except ModelNotFoundError as error:
        yield Finding(Level.NOTE, "cache directory", "none", str(error))
        return
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        advice = (
            "set XDG_CACHE_HOME to a directory that can be written (a volume): nothing is kept, each start measures "
            "the machine anew, and weights can't be streamed"
        )
        yield Finding(Level.NOTE, "cache directory", f"{directory} can't be written", advice)
        return
    status = os.statvfs(existing)
    found = f"{directory}: {size_text(status.f_bavail * status.f_frsize)} free"
    yield Finding(Level.OK, "cache directory", found)


def _num_tasks(config: Config, root: Path) -> Iterator[Finding]:
    """Threads count as well; gRPC, torch and attention each have some per core."""
    limits = []
    for directory in limiting_directories("pids", root / "sys/fs/cgroup", root / "proc/self/cgroup"):
        text = _read(directory / "pids.max")
        if text.isdecimal():
            limits.append(int(text))
    if not limits:
        yield Finding(Level.OK, "processes and threads", "no limit of a cgroup")
    elif min(limits) < _FEW_TASKS:
        advice = f"raise pids_limit to {_FEW_TASKS} or more: a service that can't start a thread fails"
        yield Finding(Level.NOTE, "processes and threads", f"at most {min(limits)} in this cgroup", advice)
    else:
        yield Finding(Level.OK, "processes and threads", f"at most {min(limits)} in this cgroup")


def _open_files(config: Config, root: Path) -> Iterator[Finding]:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _FEW_FILES:
        advice = (
            f"ulimit -n {_FEW_FILES if most == resource.RLIM_INFINITY else min(most, _FEW_FILES)}, for many clients"
        )
        yield Finding(Level.NOTE, "open files", str(limit), advice)
    else:
        yield Finding(Level.OK, "open files", str(limit))


def _locked_memory(config: Config) -> Finding:
    """The GPU's driver locks the host pool."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding(Level.OK, "locked memory", "unlimited")
    found = f"{limit / _GIB:.2f} GiB"
    if limit >= _host_bytes(config):
        return Finding(Level.OK, "locked memory", found)
    advice = "ulimit -l unlimited (compose: ulimits: memlock: -1), where the driver counts pinned memory"
    return Finding(Level.NOTE, "locked memory", found, advice)


def _access(config: Config, root: Path) -> Iterator[Finding]:
    """What stands open, and what is to close it."""
    try:
        TlsFiles.of(config.tls)
        for name, path in _key_files(config):
            first_key(name, path)
            if path.stat().st_mode & stat.S_IROTH:
                advice = f"{name}: everybody on this machine may read it: chmod 600 {path}"
                yield Finding(Level.NOTE, "access", str(path), advice)
    except ConfigError as error:
        yield Finding(Level.PROBLEM, "access", "a certificate or key cannot be used", str(error))
    has_tls = config.tls is not None
    doors: list[tuple[str, PlannerConfig | GatewayConfig, bool]] = [("planner", config.planner, has_tls)]
    if gateway := config.gateway:
        doors.append(("gateway", gateway, has_tls or gateway.certificate is not None))
    found = [
        (key, exposure(door.listen, tls, bool(door.api_keys_file or door.client_certificates)))
        for key, door, tls in doors
    ]
    found.append(("gpu", exposure(config.gpu.listen, has_tls, has_tls)))
    for index, service in enumerate(config.cpu_attn_services):
        found.append((config.cpu_attn_key(index), exposure(service.listen, has_tls, has_tls)))
    for key, complaint in found:
        if complaint:
            yield Finding(Level.NOTE, "access", f"{key}.listen: {complaint}", "see docs/security.md")
    if not any(complaint for _, complaint in found):
        yield Finding(Level.OK, "access", "no address is open to the network without a check of who calls")


def _key_files(config: Config) -> Iterator[tuple[str, Path]]:
    gateway = config.gateway or GatewayConfig()
    files = (
        ("planner.api_keys_file", config.planner.api_keys_file),
        ("gateway.api_keys_file", gateway.api_keys_file),
        ("gateway.planner_key_file", gateway.planner_key_file),
    )
    yield from ((name, path) for name, path in files if path is not None)


def _read(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_CHECKS: tuple[Callable[[Config, Path], Iterator[Finding]], ...] = (
    _model,
    _processor,
    _cores,
    _segment,
    _huge_pages,
    _numa,
    _clock,
    _governor,
    _open_files,
    _access,
    _num_tasks,
    _addresses,
    _cache,
)
