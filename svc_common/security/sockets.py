"""Files that a service makes for its peers: nobody can open them before they have the mode that they shall have."""

import contextlib
import grp
import os
from collections.abc import Iterator
from pathlib import Path

from svc_common.config import ConfigError


def group_id(name: str, group: str) -> int:
    """Number of a group, which this process may give files to. `name` of the key in the configuration.

    Raises ConfigError.
    """
    try:
        number = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"{name}: there is no group {group!r} here") from None
    if os.geteuid() != 0 and number not in (os.getegid(), *os.getgroups()):
        raise ConfigError(f"{name}: the service does not belong to the group {group!r}")
    return number


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What is made meanwhile is the user's own, sockets too. For start-up: it holds for all threads of the process."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def open_to_group(path: Path, group: int | None) -> None:
    """A file or socket for its user, and for the group if there is one."""
    if group is None:
        os.chmod(path, 0o600)
    else:
        os.chown(path, -1, group)
        os.chmod(path, 0o660)
