"""What a peer may send that is no message, or one with numbers that make no sense: refused, and nothing breaks."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cpu_decodes import SHAPE
from support.stacks import until

from cpu_attn_svc import _attention
from cpu_attn_svc import session as session_module
from cpu_attn_svc.session import RegionSession
from cpu_attn_svc.totals import Totals
from svc_common.cpu_kernels import ThreadPool
from svc_common.tensor_plane import CpuSubBatch, PlaneError, Segment, TensorPlane, _plane
from svc_common.tensor_plane.messages import (
    Descriptor,
    LayerBatch,
    SubmittedSubBatch,
    WorkError,
    decode_descriptor,
    decode_report,
    encode_descriptor,
)


@contextmanager
def connected(directory: Path) -> Iterator[tuple[RegionSession, "zmq.Socket[bytes]", _plane.Region]]:
    """A session, and its executor's ends of socket and region."""
    segment = Segment.create(directory, 1, SHAPE, 2**20)
    session = RegionSession(segment, "auto", ThreadPool(1, []), Totals())
    session.start()
    region = _plane.Region.attach(segment.path, 1, SHAPE.to_native())
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(segment.endpoint)
    try:
        yield session, socket, region
    finally:
        session.close()
        socket.close()
        region.close()


@pytest.mark.parametrize("message", [b"", b"x", b"NFID", bytes(200), b"\xff" * 64])
def test_what_is_no_descriptor_ends_the_session(message: bytes, tmp_path: Path) -> None:
    with connected(tmp_path) as (session, socket, region):
        socket.send(message)
        until(lambda: region.is_closed)
        assert not session.is_open
    assert list(tmp_path.iterdir()) == []


def test_too_large_a_message_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ hangs up before it has read it; with the same limit a sender of ours does not even try."""
    monkeypatch.setattr(session_module, "MAX_MESSAGE_BYTES", 10_000)
    batch = CpuSubBatch(0, np.ones(8, np.int32), np.zeros((8, 1000), np.int32))
    with connected(tmp_path) as (session, socket, _):
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.send(encode_descriptor(Descriptor(1, 1, 0, (SubmittedSubBatch(batch, 0),))))
        assert monitor.poll(20_000)
        assert session.iterations == 0
        socket.disable_monitor()
    monkeypatch.setattr("svc_common.tensor_plane.plane.MAX_MESSAGE_BYTES", 10_000)
    segment = Segment.create(tmp_path, 1, SHAPE, 2**20)
    plane = TensorPlane.attach(segment.path, segment.endpoint, 1, SHAPE)
    with pytest.raises(PlaneError, match="the descriptor has 32104 bytes, at most 10000 are taken"):
        plane.begin(1, [batch], 0)
    plane.close()
    segment.close()


NUMBERS = st.one_of(st.integers(-2, 70), st.integers(-(2**31), 2**31 - 1))
COUNTS = st.integers(0, 3)


@st.composite
def int32s(draw: st.DrawFn, *shape: int) -> Any:
    count = int(np.prod(shape))
    return np.array(draw(st.lists(NUMBERS, min_size=count, max_size=count)), np.int32).reshape(shape)


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    """Well-formed, with numbers of all kinds in it."""
    sub_batches = []
    for _ in range(draw(COUNTS)):
        num, stride = draw(COUNTS), draw(COUNTS)
        batch = CpuSubBatch(draw(NUMBERS), draw(int32s(num)), draw(int32s(num, stride)))
        sub_batches.append(SubmittedSubBatch(batch, draw(st.integers(0, 2**32 - 1))))
    layer_batches = []
    for _ in range(draw(st.integers(0, 1))):
        chunks, decodes, stride = draw(COUNTS), draw(COUNTS), draw(COUNTS)
        arrays = [draw(int32s(n)) for n in (chunks, chunks, decodes)]
        tables = draw(int32s(chunks + decodes, stride))
        layer_batches.append(LayerBatch(draw(NUMBERS), draw(NUMBERS), *arrays, tables))
    first, count = draw(st.integers(-2, 5)), draw(st.integers(0, 5))
    layers = range(first, first + count)
    return Descriptor(
        1,
        7,
        draw(NUMBERS),
        tuple(sub_batches),
        layers,
        draw(st.booleans()),
        tuple(layer_batches),
        0,
        draw(st.booleans()),
    )


@given(descriptors())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_of_all_kinds_are_refused_or_computed(cancelled_session: RegionSession, drawn: Descriptor) -> None:
    """A cancelled worker checks all, and then ends at its first wait: whatever was let through would have run."""
    descriptor = decode_descriptor(encode_descriptor(drawn))
    worker = cancelled_session._worker
    assert worker is not None
    if descriptor.has_work:
        work = cancelled_session._compute(worker, descriptor)
        assert work.error in (WorkError.INVALID_DESCRIPTOR, WorkError.INTERRUPTED)
        assert work.text


@pytest.fixture
def cancelled_session(tmp_path: Path) -> Iterator[RegionSession]:
    session = RegionSession(Segment.create(tmp_path, 1, SHAPE, 2**20), "auto", ThreadPool(1, []), Totals())
    assert isinstance(session._worker, _attention.Worker)
    session._worker.cancel()
    session.start()
    yield session
    session.close()


@given(st.binary(max_size=300), st.sampled_from([b"", b"NFID\x04\x00", b"NFIR\x04\x00"]))
@settings(max_examples=300, deadline=None)
def test_bytes_of_all_kinds_are_a_message_or_none(data: bytes, head: bytes) -> None:
    for decode in (decode_descriptor, decode_report):
        with contextlib.suppress(PlaneError):
            decode(head + data)


@given(descriptors(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_descriptor_with_a_flipped_byte_is_a_message_or_none(descriptor: Descriptor, data: st.DataObject) -> None:
    message = bytearray(encode_descriptor(descriptor))
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(PlaneError):
        decode_descriptor(bytes(message))
