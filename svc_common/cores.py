"""Which cores this process may use: how many, and which CPUs its computing threads are to stay on."""

import os
import re
import socket
from collections.abc import Collection
from pathlib import Path

from svc_common.cgroups import CGROUP_ROOT, OWN_CGROUPS, limiting_directories

SYS_CPU = Path("/sys/devices/system/cpu")


def usable_cores(cgroup_root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> int:
    """By affinity and by the cgroup's quota, whichever is less; at least 1. A fraction of a core counts as one."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota_cores(cgroup_root, own_cgroups)
    return max(1, cores if quota is None else min(cores, quota))


class CpuClaim:
    """CPUs that no other NeoFlex process of this machine pins threads to, as long as this object lives.

    A claim is a socket's name in Linux' abstract namespace: it leaves no file and ends with the process. Services in
    containers of their own do not see each other's claims, but those that take from opposite ends stay apart.
    """

    def __init__(self, candidates: Collection[int], num: int) -> None:
        """Takes the first `num` that are free, fewer where others hold the rest."""
        self._sockets: dict[int, socket.socket] = {}
        for cpu in candidates:
            if len(self._sockets) == num:
                break
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0neoflex-cpu-{cpu}")
            except OSError:
                claim.close()
                continue
            self._sockets[cpu] = claim

    @property
    def cpus(self) -> list[int]:
        return list(self._sockets)

    def release(self) -> None:
        for claim in self._sockets.values():
            claim.close()
        self._sockets.clear()


def pinnable_cpus(from_end: bool) -> list[int]:
    """CPUs to pin threads to, the best first: full cores before their second threads, node by node.

    Empty where pinning would only harm: with a single CPU, or where a quota gives less time than the CPUs have, so that
    others are meant to run on them, too. Services that share a machine take from opposite ends.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2 or usable_cores() < len(allowed):
        return []
    return ordered_cpus(allowed, from_end)


def ordered_cpus(allowed: Collection[int], from_end: bool, sys_cpu: Path = SYS_CPU) -> list[int]:
    """See `pinnable_cpus`."""

    def rank(cpu: int) -> tuple[int, int, int]:
        siblings = _cpu_list(sys_cpu / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        earlier = sum(sibling < cpu and sibling in allowed for sibling in siblings)
        nodes = [int(path.name[4:]) for path in (sys_cpu / f"cpu{cpu}").glob("node[0-9]*")]
        node = min(nodes, default=0)
        return (earlier, -node, -cpu) if from_end else (earlier, node, cpu)

    return sorted(allowed, key=rank)


def _cpu_list(path: Path) -> list[int]:
    """Of a file such as "0-3,8"; empty where there is none."""
    try:
        ranges = re.findall(r"(\d+)(?:-(\d+))?", path.read_text())
    except OSError:
        return []
    return [cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)]


def _quota_cores(cgroup_root: Path, own_cgroups: Path) -> int | None:
    """The tightest quota on the way from the process's own cgroup up to the root; None: no limit."""
    quotas = [_read_quota(directory) for directory in limiting_directories("cpu", cgroup_root, own_cgroups)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_quota(directory: Path) -> int | None:
    for read in (_read_v2, _read_v1):
        try:
            quota_us, period_us = read(directory)
        except (OSError, ValueError):
            continue
        if quota_us > 0 and period_us > 0:
            return -(-quota_us // period_us)
    return None


def _read_v2(directory: Path) -> tuple[int, int]:
    quota, period = (directory / "cpu.max").read_text().split()
    return int(quota), int(period)  # "max" is no number: no limit


def _read_v1(directory: Path) -> tuple[int, int]:
    quota = (directory / "cpu.cfs_quota_us").read_text()
    return int(quota), int((directory / "cpu.cfs_period_us").read_text())
