"""What the kernel says of a process's memory.

Never the process's resident, shared or unique total: the first two also count pages of program files, which come
whenever they are first touched, the last also pages of a shared file that nobody else has touched yet.
"""

import psutil


def private_bytes(pid: int) -> int:
    """Resident bytes that belong to no file."""
    return sum(mapping.anonymous for mapping in psutil.Process(pid).memory_maps())


def mapped_bytes(pid: int, name: str) -> int:
    """Resident bytes of the mapped files whose path contains `name`."""
    return sum(mapping.rss for mapping in psutil.Process(pid).memory_maps() if name in mapping.path)
