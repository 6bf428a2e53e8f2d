"""What the system gives: shared memory, huge pages, NUMA nodes, clock, limits, the cache directory."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from neoflex.doctor.finding import Finding, Level
from svc_common.cgroups import limiting_directories
from svc_common.config import Config
from svc_common.memory import size_text
from svc_common.model.store import ModelNotFoundError, default_cache_dir

_FEW_FILES = 4096
"""Open files: a connection takes one in planner and gateway each."""
_FEW_TASKS = 512
_FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")
_GIB = 2**30


def segment(config: Config, root: Path) -> Iterator[Finding]:
    """Pools in one directory share its room."""
    wanted: dict[Path, int] = {}
    for service in config.cpu_attn_services:
        wanted[service.segment_dir] = wanted.get(service.segment_dir, 0) + service.kv_bytes
    for directory, num_bytes in wanted.items():
        yield from _shared_memory(directory, num_bytes, root)


def _shared_memory(directory: Path, num_bytes: int, root: Path) -> Iterator[Finding]:
    try:
        status = os.statvfs(root / directory.relative_to("/") if directory.is_absolute() else directory)
    except OSError:
        return  # Which the files' check says.
    free = status.f_bavail * status.f_frsize
    found = f"{directory}: {free / _GIB:.2f} GiB free, cpu_attn.kv_bytes {num_bytes / _GIB:.2f} GiB"
    if num_bytes <= free:
        yield Finding(Level.OK, "shared memory", found)
        return
    advice = "raise --shm-size (compose: shm_size), mount a larger tmpfs, or name another cpu_attn.segment_dir"
    yield Finding(Level.PROBLEM, "shared memory", found, advice)


def huge_pages(config: Config, root: Path) -> Iterator[Finding]:
    path = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = _read(root / path)
    setting = text.partition("[")[2].partition("]")[0] if "[" in text else ""
    if setting in ("always", "advise", "within_size", "force"):
        yield Finding(Level.OK, "huge pages", f"shared memory: {setting}")
    else:
        advice = f"as root: echo advise > /{path}; attention then looks up fewer addresses"
        yield Finding(Level.NOTE, "huge pages", f"shared memory: {setting or 'not known'}", advice)


def numa(config: Config, root: Path) -> Iterator[Finding]:
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if nodes > len(config.cpu_attn):
        advice = "run one CPU attention service per node: a pool on the other node is read at half the speed"
        yield Finding(Level.NOTE, "NUMA nodes", str(nodes), advice)
    else:
        yield Finding(Level.OK, "NUMA nodes", str(max(1, nodes)))


def clock(config: Config, root: Path) -> Iterator[Finding]:
    source = _read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in _FAST_CLOCKS:
        yield Finding(Level.OK, "clock", source)
    else:
        advice = "reading the time may cost a system call; prefer tsc where the machine has it"
        yield Finding(Level.NOTE, "clock", source or "not known", advice)


def governor(config: Config, root: Path) -> Iterator[Finding]:
    governor = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave":
        yield Finding(Level.NOTE, "CPU frequency", governor, "as root: cpupower frequency-set -g performance")
    elif governor:
        yield Finding(Level.OK, "CPU frequency", governor)


def cache(config: Config, root: Path) -> Iterator[Finding]:
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


def num_tasks(config: Config, root: Path) -> Iterator[Finding]:
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


def open_files(config: Config, root: Path) -> Iterator[Finding]:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _FEW_FILES:
        advice = (
            f"ulimit -n {_FEW_FILES if most == resource.RLIM_INFINITY else min(most, _FEW_FILES)}, for many clients"
        )
        yield Finding(Level.NOTE, "open files", str(limit), advice)
    else:
        yield Finding(Level.OK, "open files", str(limit))


def _read(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
