"""Region and doorbells with the other side in a process of its own, which is killed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.plane import EPOCH, POOL_BYTES, SHAPE, Peer, attach

from svc_common.tensor_plane import (
    CpuSubBatch,
    PeerLostError,
    PlaneError,
    Segment,
    TensorPlane,
    remove_stale_segments,
)


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    started: list[Peer] = []
    yield started
    for peer in started:
        peer.kill()


def test_killed_owner_is_noticed_within_a_second(segment_dir: Path, peers: list[Peer]) -> None:
    peers.append(Peer("owner", segment_dir, EPOCH, POOL_BYTES))
    path, endpoint = peers[0].first_line
    plane = TensorPlane.attach(path, endpoint, EPOCH, SHAPE)
    assert plane.peer_alive()
    plane.begin(1, [CpuSubBatch(0, np.array([1], np.int32), np.array([[0]], np.int32))], 1)
    plane.submit(0)
    timer = threading.Timer(0.1, peers[0].kill)
    timer.start()
    # A timeout of a second, were it not noticed, would raise PlaneTimeoutError.
    with pytest.raises(PeerLostError):
        plane.wait(0, 0.1 + 1.0)
    with pytest.raises(PeerLostError):
        plane.finish(1.0)
    assert not plane.peer_alive()
    timer.join()
    plane.close()


def test_killed_executor_is_noticed(segment: Segment, peers: list[Peer]) -> None:
    peers.append(Peer("executor", segment.path, segment.endpoint, EPOCH))
    assert peers[0].first_line == ["attached"]
    assert segment.region.is_attached
    assert segment.region.peer_alive()
    peers[0].kill()
    assert not segment.region.peer_alive()


def test_stale_segments_go_and_live_ones_stay(segment: Segment, segment_dir: Path, peers: list[Peer]) -> None:
    peers.append(Peer("owner", segment_dir, EPOCH, POOL_BYTES))
    dead = Path(peers[0].first_line[0]).parent
    assert remove_stale_segments(segment_dir) == 0
    peers[0].kill()
    assert dead.is_dir()
    unfinished = segment_dir / "neoflex-killed-early"
    unfinished.mkdir()
    foreign = segment_dir / "neoflex-notes"
    foreign.mkdir()
    (foreign / "text").touch()
    (segment_dir / "neoflex-file").touch()
    assert remove_stale_segments(segment_dir) == 2
    left = {path.name for path in segment_dir.iterdir()}
    assert left == {Path(segment.path).parent.name, "neoflex-notes", "neoflex-file"}
    attach(segment).close()


def test_attaching_to_a_dead_owners_region_is_refused(segment_dir: Path, peers: list[Peer]) -> None:
    peers.append(Peer("owner", segment_dir, EPOCH, POOL_BYTES))
    path, endpoint = peers[0].first_line
    peers[0].kill()
    with pytest.raises(PlaneError, match="is gone"):
        TensorPlane.attach(path, endpoint, EPOCH, SHAPE)
