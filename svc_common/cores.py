"""How many cores this process may use: by affinity and by its cgroup's quota, whichever is less."""

import os
from pathlib import Path

from svc_common.cgroups import CGROUP_ROOT, OWN_CGROUPS, limiting_directories


def usable_cores(cgroup_root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> int:
    """At least 1. A fractional quota counts its started core."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota_cores(cgroup_root, own_cgroups)
    return max(1, cores if quota is None else min(cores, quota))


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
