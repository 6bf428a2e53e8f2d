"""The directory of layer files, seen without reading them: which lie there, who uses it now, and what may go.

A file's name says of which model and type it is (svc_common/decoder/layer_writer.py). Its time of access is set at each
use, since file systems may leave that to whoever cares.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from svc_common.model.store import default_cache_dir

SUFFIX = ".weights"
PART_SUFFIX = ".part"
"""Of a file that is being written."""
_S_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class StoredLayers:
    """One layer file."""

    path: Path
    model: str
    dtype: str
    num_bytes: int
    """On the disk."""
    used_s: float
    """Latest use, in seconds since 1970."""


def layers_dir() -> Path:
    """Raises ModelNotFoundError where the user has no cache directory."""
    return default_cache_dir() / "layers"


@contextmanager
def locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """One process at a time; makes the directory. The lock falls with the process.

    Raises OSError, and BlockingIOError where another has it and `wait` is false.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def note_use(path: Path) -> None:
    """Now; where the directory is another user's, nobody is told."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def stored_layers(directory: Path) -> tuple[StoredLayers, ...]:
    """All files there, the one used last first. None where there is no such directory."""
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):  # Gone since.
            status = path.stat()
            model, dtype = _named(path)
            found.append(StoredLayers(path, model, dtype, 512 * status.st_blocks, status.st_atime))
    return tuple(sorted(found, key=lambda item: item.used_s, reverse=True))


def _named(path: Path) -> tuple[str, str]:
    """Model and type, of MODEL-TYPE-DIGEST."""
    stem = path.name.removesuffix(SUFFIX)
    parts = stem.rsplit("-", 2)
    return (parts[0], parts[1]) if len(parts) == 3 else (stem, "")


def prune(directory: Path, unused_days: float, now_s: float | None = None) -> tuple[StoredLayers, ...]:
    """Deletes what nobody has opened for so many days, and what a killed process left half written; the files deleted.

    A service that has one mapped goes on with it, and packs it anew when it starts again. Raises OSError, and
    BlockingIOError while a service is packing or checking weights there.
    """
    if not directory.is_dir():
        return ()
    now_s = time.time() if now_s is None else now_s
    with locked(directory, wait=False):
        for abandoned in directory.glob(f"*{PART_SUFFIX}"):
            abandoned.unlink()
        old = tuple(item for item in stored_layers(directory) if now_s - item.used_s >= unused_days * _S_PER_DAY)
        for item in old:
            item.path.unlink(missing_ok=True)
    return old
