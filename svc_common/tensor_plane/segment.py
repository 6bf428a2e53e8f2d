"""The service's side of a region on disk: a private directory that lives only until the executor has mapped it."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from svc_common.security.sockets import open_to_group
from svc_common.tensor_plane import _plane
from svc_common.tensor_plane.errors import PlaneError
from svc_common.tensor_plane.shape import RegionShape

_PREFIX = "neoflex-"
_REGION = "region"
_SOCKET = "descriptors"
# A Unix socket's path, without its closing zero.
_MAX_SOCKET_PATH_BYTES = 107
_ATTEMPTS = 3


class Segment:
    """A region with its names: `neoflex-*/region` and `neoflex-*/descriptors`, below the segment directory.

    They are the user's own, modes 0700 and 0600. A group, if there is one, gets 0710 and 0660 once all is in place.

    `unlink` removes the names and keeps the region, so that nothing is left behind however both processes end.
    """

    def __init__(self, region: _plane.Region, shape: RegionShape, directory: Path, group: int | None) -> None:
        """Use `create`."""
        self.region = region
        self.shape = shape
        self._directory = directory
        self._group = group

    @classmethod
    def create(
        cls,
        segment_dir: Path,
        epoch: int,
        shape: RegionShape,
        pool_bytes: int,
        cpus: Sequence[int] = (),
        group: int | None = None,
    ) -> "Segment":
        """Reserves the memory. Header and exchange slots come on top of `pool_bytes`. Raises PlaneError.

        `cpus`: where the threads that will read the pool are pinned; its memory is taken next to them. `group`: may
        attach the region, too, from `admit_group` on.
        """
        native = shape.to_native()
        for _ in range(_ATTEMPTS):
            try:
                directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=segment_dir))
            except OSError as error:
                raise PlaneError(f"{segment_dir}: {error.strerror}") from error
            try:
                _check_socket_path(directory / _SOCKET)
                region = _plane.Region.create(str(directory / _REGION), epoch, native, pool_bytes, cpus)
                return cls(region, shape, directory, group)
            except PlaneError:
                # Another service that starts may have swept the directory away before its region was locked.
                swept = not directory.exists()
                _remove(directory)
                if not swept:
                    raise
        raise PlaneError(f"{segment_dir}: segments are taken for stale while they are made")

    @property
    def path(self) -> str:
        return str(self._directory / _REGION)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self._directory / _SOCKET}"

    def admit_group(self) -> None:
        """Once the socket is bound: nobody else came into the directory before. Raises PlaneError."""
        if self._group is None:
            return
        try:
            for name in (_SOCKET, _REGION):
                open_to_group(self._directory / name, self._group)
            os.chown(self._directory, -1, self._group)
            os.chmod(self._directory, 0o710)
        except OSError as error:
            raise PlaneError(f"{self._directory} can't be given to group {self._group}: {error.strerror}") from error

    def unlink(self) -> None:
        """Removes the names. What is mapped and connected stays so."""
        _remove(self._directory)

    def close(self) -> None:
        """Gives the region up and removes its names."""
        self.unlink()
        self.region.close()


def remove_stale_segments(segment_dir: Path) -> int:
    """Removes what services left that were killed between creating a region and its attachment.

    Never touches the segment of a living service: its region is locked. Returns how many were removed.
    """
    removed = 0
    for directory in segment_dir.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            removed += _remove_if_stale(directory)
    return removed


def _remove_if_stale(directory: Path) -> bool:
    if not directory.is_dir() or directory.is_symlink() or directory.stat().st_uid != os.geteuid():
        return False
    try:
        fd = os.open(directory / _REGION, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Names are removed with the region last: without it nothing else is there.
        directory.rmdir()
        return True
    try:
        if not _plane.try_lock_as_owner(fd):
            return False
        _remove(directory)
        return True
    finally:
        os.close(fd)


def _remove(directory: Path) -> None:
    """The region goes last: as long as it is there, its lock says whether the others are in use."""
    for path in (directory / _SOCKET, directory / _REGION):
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()


def _check_socket_path(path: Path) -> None:
    num_bytes = len(os.fsencode(path))
    if num_bytes > _MAX_SOCKET_PATH_BYTES:
        raise PlaneError(f"{path}: a socket's path has at most {_MAX_SOCKET_PATH_BYTES} bytes, this one {num_bytes}")
