"""Who can open a Unix socket: its user, or a group that was named, and nobody else."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.other_user import opened_by

from svc_common.config import ConfigError
from svc_common.grpc_server import GrpcServer
from svc_common.security.door import Door, socket_group
from svc_common.security.sockets import group_id, open_to_group, private_files

GROUP, OTHER_GROUP = 4321, 4322
DENIED = "Permission denied"


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """Where everybody may look, unlike in pytest's own."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def test_what_is_made_is_private_from_the_start(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with private_files():
            (tmp_path / "mine").write_text("")
        (tmp_path / "later").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "later").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("group", [None, GROUP])
async def test_a_grpc_socket(group: int | None, open_dir: Path) -> None:
    path = open_dir / "grpc"
    server = GrpcServer(f"unix:{path}", [], Door(socket_group=group))
    await server.start()
    try:
        assert path.stat().st_mode & 0o777 == (0o600 if group is None else 0o660)
        assert opened_by(path, socket=True) == DENIED
        assert opened_by(path, OTHER_GROUP, socket=True) == DENIED
        assert opened_by(path, GROUP, socket=True) == (DENIED if group is None else "opened")
    finally:
        await server.stop(0)


def test_a_file_opened_to_a_group(open_dir: Path) -> None:
    path = open_dir / "file"
    path.write_text("")
    open_to_group(path, GROUP)
    assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (GROUP, 0o660)
    assert [opened_by(path, GROUP), opened_by(path, OTHER_GROUP), opened_by(path)] == ["opened", DENIED, DENIED]


def test_groups_by_name_and_by_number() -> None:
    assert group_id("cpu_attn.segment_group", "daemon") == 1
    assert group_id("cpu_attn.segment_group", "4321") == 4321
    with pytest.raises(ConfigError, match=r"cpu_attn.segment_group: there is no group 'no-such-group' here"):
        group_id("cpu_attn.segment_group", "no-such-group")


def test_a_group_without_a_socket_is_refused() -> None:
    assert socket_group("gpu", "127.0.0.1:1", None) is None
    assert socket_group("gpu", "unix:/s", "4321") == 4321
    with pytest.raises(ConfigError, match=r"gpu.socket_group has no effect: gpu.listen is 127.0.0.1:1"):
        socket_group("gpu", "127.0.0.1:1", "4321")


def test_a_group_of_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="the service does not belong to the group '4321'"):
        group_id("cpu_attn.segment_group", "4321")
    assert group_id("cpu_attn.segment_group", str(os.getegid())) == os.getegid()
