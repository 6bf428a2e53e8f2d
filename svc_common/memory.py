"""How much memory this process may use: that of the machine, or its cgroup's limit where that is less."""

import ctypes
from pathlib import Path

from svc_common.cgroups import CGROUP_ROOT, OWN_CGROUPS, limiting_directories
from svc_common.config import ConfigError

_MEMINFO = Path("/proc/meminfo")
_SMAPS = Path("/proc/self/smaps")
_HUGE_FIELDS = ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(num_bytes: float) -> str:
    """Bytes for people: 98.4 MiB."""
    for unit in _UNITS[:-1]:
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def usable_memory_bytes(
    cgroup_root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS, meminfo: Path = _MEMINFO
) -> int:
    """Bytes in all, used ones included."""
    limits = [_limit_bytes(directory) for directory in limiting_directories("memory", cgroup_root, own_cgroups)]
    return min([machine_bytes(meminfo), *(limit for limit in limits if limit is not None)])


def check_fits_memory(key: str, num_bytes: int, usable_bytes: int) -> None:
    """Raises ConfigError where a configured size can never be had, before anything is reserved for it."""
    if num_bytes > usable_bytes:
        raise ConfigError(f"{key} is {num_bytes} bytes, there are {usable_bytes} bytes of memory to use in all")


def give_back_freed() -> None:
    """Returns to the kernel what this process has freed and its allocator keeps; where the allocator is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def huge_page_bytes(mapped_path: str, smaps: Path = _SMAPS) -> int:
    """How much of a file that this process has mapped lies in huge pages."""
    found = 0
    of_this_file = False
    for line in smaps.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if " " in name:  # The head of a mapping: "address-address flags offset device:device inode path"
            of_this_file = line.endswith(f" {mapped_path}")
        elif of_this_file and name in _HUGE_FIELDS:
            found += int(value.split()[0]) * 1024
    return found


def machine_bytes(meminfo: Path = _MEMINFO) -> int:
    """That the machine has, whatever this process may use of it."""
    return _meminfo_bytes("MemTotal", meminfo)


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """That the machine could give now without swapping, pages of files among them that it only keeps."""
    return _meminfo_bytes("MemAvailable", meminfo)


def _meminfo_bytes(field: str, meminfo: Path) -> int:
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _limit_bytes(directory: Path) -> int | None:
    """None: no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((directory / name).read_text())
        except (OSError, ValueError):  # "max" is no number.
            continue
    return None
