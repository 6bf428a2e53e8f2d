"""A region's names: there until the executor is connected, gone from then on, and for whom they are."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.cpu_decodes import SHAPE
from support.other_user import NOBODY, opened_by
from support.stacks import own_environment, until

from cpu_attn_svc import session as session_module
from cpu_attn_svc.session import RegionSession
from cpu_attn_svc.totals import Totals
from svc_common.cpu_kernels import ThreadPool
from svc_common.tensor_plane import Segment, TensorPlane, _plane


class CountingSocket:
    """Of how often it was looked at."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self.num_polls = 0

    def poll(self, timeout_ms: int) -> int:
        self.num_polls += 1
        return self._socket.poll(timeout_ms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def test_names_stay_until_the_executor_is_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It maps the region first, and connects when its thread comes to it: that may take longer than a look."""
    monkeypatch.setattr(session_module, "_IDLE_CHECK_MS", 1)
    segment = Segment.create(tmp_path, 1, SHAPE, 2**20)
    session = RegionSession(segment, "auto", ThreadPool(1, []), Totals())
    session._socket = socket = CountingSocket(session._socket)  # type: ignore[assignment]
    session.start()
    try:
        region = _plane.Region.attach(segment.path, 1, SHAPE.to_native())
        seen = socket.num_polls
        until(lambda: socket.num_polls > seen + 3)
        assert Path(segment.path).exists()
        region.close()
        until(lambda: not session.is_open)
        assert not Path(segment.path).exists()
    finally:
        session.close()


def test_names_go_with_the_first_message(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path, 1, SHAPE, 2**20)
    session = RegionSession(segment, "auto", ThreadPool(1, []), Totals())
    session.start()
    try:
        plane = TensorPlane.attach(segment.path, segment.endpoint, 1, SHAPE)
        until(lambda: not Path(segment.path).exists())
        assert session.is_open
        plane.close()
    finally:
        session.close()


GROUP = 4321


@pytest.mark.parametrize("group", [None, GROUP])
def test_only_the_segments_group_gets_in(group: int | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        segment = Segment.create(Path(name), 1, SHAPE, 2**20, group=group)
        directory = Path(segment.path).parent
        assert directory.stat().st_mode & 0o777 == 0o700  # For all before the socket is there.
        session = RegionSession(segment, "auto", ThreadPool(1, []), Totals())
        session.start()
        try:
            socket = directory / "descriptors"
            expected = "opened" if group else "Permission denied"
            assert [opened_by(segment.path, GROUP), opened_by(socket, GROUP, socket=True)] == [expected] * 2
            for groups in ((), (GROUP + 1,)):
                refused = [opened_by(segment.path, *groups), opened_by(socket, *groups, socket=True)]
                assert refused == ["Permission denied"] * 2
            assert directory.stat().st_mode & 0o777 == (0o710 if group else 0o700)
            if group:
                assert Path(segment.path).stat().st_mode & 0o777 == socket.stat().st_mode & 0o777 == 0o660
        finally:
            session.close()


_EXECUTOR = f"""
import os, sys
from support.cpu_decodes import SHAPE
from svc_common.tensor_plane import PlaneError, TensorPlane
os.setgroups([int(sys.argv[1])])
os.setgid({NOBODY})
os.setuid({NOBODY})
try:
    plane = TensorPlane.attach(sys.argv[2], sys.argv[3], 1, SHAPE)
    print("attached", plane.peer_alive())
    plane.close()
except PlaneError as error:
    print(str(error).rpartition(": ")[2])
"""


@pytest.mark.parametrize(("group", "said"), [(GROUP + 1, "Permission denied"), (GROUP, "attached True")])
def test_an_executor_of_another_user_attaches_by_the_group(group: int, said: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        segment = Segment.create(Path(name), 1, SHAPE, 2**20, group=GROUP)
        session = RegionSession(segment, "auto", ThreadPool(1, []), Totals())
        session.start()
        command = [sys.executable, "-c", _EXECUTOR, str(group), segment.path, segment.endpoint]
        ended = subprocess.run(command, env=own_environment(), check=True, capture_output=True, text=True)
        assert ended.stdout.strip() == said
        session.close()
        assert list(Path(name).iterdir()) == []
