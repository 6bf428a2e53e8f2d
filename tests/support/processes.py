"""What the kernel says of a process's memory.

Never the process's resident, shared or unique total: the first two also count pages of program files, which come
whenever they are first touched, the last also pages of a shared file that nobody else has touched yet.
"""

from dataclasses import dataclass

import psutil


def private_bytes(pid: int) -> int:
    """Resident bytes that belong to no file."""
    return sum(mapping.anonymous for mapping in psutil.Process(pid).memory_maps())


def mapped_bytes(pid: int, name: str) -> int:
    """Resident bytes of the mapped files whose path contains `name`."""
    return sum(mapping.rss for mapping in psutil.Process(pid).memory_maps() if name in mapping.path)


@dataclass(frozen=True)
class SharedBytes:
    """Of the mapped files of one process whose path contains a text."""

    resident: int
    proportional: int
    """Each page divided by the number of processes that have it."""
    anonymous: int
    """Copied since."""


def shared_bytes(pid: int, name: str) -> SharedBytes:
    mapped = [mapping for mapping in psutil.Process(pid).memory_maps() if name in mapping.path]
    return SharedBytes(*(sum(getattr(item, field) for item in mapped) for field in ("rss", "pss", "anonymous")))
