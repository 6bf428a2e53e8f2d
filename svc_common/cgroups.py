"""Which cgroups limit this process: its own and those above it, in versions 1 and 2."""

from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def limiting_directories(controller: str, cgroup_root: Path, own_cgroups: Path) -> list[Path]:
    """Where limits of a controller ("cpu", "memory") may stand, from the process's own cgroup up to the root."""
    directories = {cgroup_root, cgroup_root / controller}
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        # hierarchy:controllers:path; version 2 has one line with no controllers.
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = cgroup_root / controller if controllers else cgroup_root
        own = base / path.lstrip("/")
        directories.update(parent for parent in (own, *own.parents) if parent.is_relative_to(base))
    return sorted(directories)
