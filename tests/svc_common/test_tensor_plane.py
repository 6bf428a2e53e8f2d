"""Region and doorbells, both sides in this process."""

import struct
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from support.plane import EPOCH, POOL_BYTES, SHAPE, attach

from svc_common.tensor_plane import CpuSubBatch, PeerLostError, PlaneError, PlaneTimeoutError, Report, Segment
from svc_common.tensor_plane.messages import WorkError, WorkReport, decode_descriptor, encode_report


def owner_socket(segment: Segment) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.bind(segment.endpoint)
    return socket


def test_pool_takes_what_fits_and_the_rest_is_small(segment: Segment) -> None:
    block_bytes = 3 * 2 * 2 * 8 * 40 * 2
    assert SHAPE.block_bytes == block_bytes
    assert segment.region.num_blocks == POOL_BYTES // block_bytes == 39
    assert segment.region.pool_bytes == 39 * block_bytes <= POOL_BYTES
    slots_bytes = 2 * 4 * 5 * 40 * (6 + 2 + 2 + 6)
    pages = 3 * 4096  # header, and the rounding of exchange slots and pool
    assert segment.region.region_bytes <= segment.region.pool_bytes + slots_bytes + pages
    assert Path(segment.path).stat().st_size == segment.region.region_bytes
    assert Path(segment.path).stat().st_mode & 0o777 == 0o600
    assert Path(segment.path).parent.stat().st_mode & 0o777 == 0o700


def test_arrays_are_shared_and_disjoint(segment: Segment) -> None:
    plane = attach(segment)
    assert plane.pool.shape == (3, 39, 2, 2, 8 * 40)
    assert plane.pool.dtype == np.float16
    assert [plane.q(0).shape, plane.k(0).shape, plane.v(1).shape, plane.out(1).shape] == [
        (5, 6, 40),
        (5, 2, 40),
        (5, 2, 40),
        (5, 6, 40),
    ]
    arrays = [plane.pool, *(part(slot) for slot in (0, 1) for part in (plane.q, plane.k, plane.v, plane.out))]
    for value, array in enumerate(arrays, start=1):
        assert array.ctypes.data % 64 == 0
        array[:] = value
    assert plane.pool.ctypes.data % 4096 == 0
    for value, array in enumerate(arrays, start=1):
        assert (array == value).all()
    # The owner's own mapping shows the same bytes.
    region = segment.region
    owners = region.memory()[region.pool_offset :][: region.pool_bytes].view(np.float16)
    assert (owners == 1).all()
    plane.close()
    assert (arrays[1] == 2).all(), "arrays outlive close"


def test_bf16_comes_as_uint16(segment_dir: Path) -> None:
    shape = replace(SHAPE, kv_dtype="bf16", exchange_dtype="bf16")
    segment = Segment.create(segment_dir, EPOCH, shape, POOL_BYTES)
    plane = attach(segment, shape=shape)
    assert plane.pool.dtype == plane.q(0).dtype == np.uint16
    plane.close()
    segment.close()


def test_int8_has_scales_behind_the_pool(segment_dir: Path) -> None:
    shape = replace(SHAPE, kv_dtype="int8")
    assert shape.block_bytes == 3 * 2 * 2 * (8 * 40 + 4)
    segment = Segment.create(segment_dir, EPOCH, shape, POOL_BYTES)
    region = segment.region
    assert region.num_blocks == POOL_BYTES // shape.block_bytes == 77
    assert region.pool_bytes == 77 * shape.block_bytes
    plane = attach(segment, shape=shape)
    assert (plane.pool.shape, plane.pool.dtype) == ((3, 77, 2, 2, 320), np.int8)
    assert plane.scales is not None
    assert (plane.scales.shape, plane.scales.dtype) == ((3, 77, 2, 2), np.float32)
    plane.pool[:], plane.scales[:] = -1, 7.0
    assert (plane.pool == -1).all()
    owners = region.memory()[region.scales_offset :].view(np.float32)[: plane.scales.size]
    assert (owners == 7).all()
    plane.close()
    segment.close()
    with pytest.raises(PlaneError, match="not exchanged in int8"):
        Segment.create(segment_dir, EPOCH, replace(shape, exchange_dtype="int8"), POOL_BYTES)


def test_names_go_while_the_region_stays(segment: Segment, segment_dir: Path) -> None:
    plane = attach(segment)
    assert segment.region.is_attached
    segment.unlink()
    assert list(segment_dir.iterdir()) == []
    assert plane.peer_alive()
    assert segment.region.peer_alive()
    plane.close()
    assert not segment.region.peer_alive()
    assert segment.region.is_closed


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, struct.pack("<Q", 1), "not a NeoFlex region"),
        (8, struct.pack("<I", 99), "layout version 99, this side has 4"),
        (24, struct.pack("<Q", 1 << 20), "its header says 1048576"),
    ],
)
def test_foreign_headers_are_refused(segment: Segment, offset: int, value: bytes, message: str) -> None:
    with Path(segment.path).open("r+b") as file:
        file.seek(offset)
        file.write(value)
    with pytest.raises(PlaneError, match=message):
        attach(segment)
    assert not segment.region.is_attached


def test_other_epoch_shape_and_size_are_refused(segment: Segment) -> None:
    with pytest.raises(PlaneError, match="epoch 41, expected 42"):
        attach(segment, epoch=EPOCH + 1)
    with pytest.raises(PlaneError, match="made for another shape"):
        attach(segment, shape=replace(SHAPE, head_dim=48))
    with pytest.raises(PlaneError, match="made for another shape"):
        attach(segment, shape=replace(SHAPE, softmax_scale=0.5))
    with Path(segment.path).open("r+b") as file:
        file.truncate(segment.region.region_bytes + 4096)
    with pytest.raises(PlaneError, match="its shape takes"):
        attach(segment)
    with Path(segment.path).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(PlaneError, match="too small for a region"):
        attach(segment)


def test_impossible_shapes_are_refused(segment_dir: Path) -> None:
    for change, message in [
        ({"head_dim": 257}, "head_dim"),
        ({"num_kv_heads": 4}, "divide"),
        ({"kv_dtype": "fp8"}, "fp8"),
        ({"num_layers": 0}, "at least 1"),
    ]:
        with pytest.raises(PlaneError, match=message):
            Segment.create(segment_dir, EPOCH, replace(SHAPE, **change), POOL_BYTES)  # type: ignore[arg-type]
    assert list(segment_dir.iterdir()) == []


def test_a_region_takes_one_executor(segment: Segment) -> None:
    plane = attach(segment)
    with pytest.raises(PlaneError, match="another executor is attached"):
        attach(segment)
    plane.close()


def test_no_room_is_said_and_leaves_nothing(segment_dir: Path) -> None:
    with pytest.raises(PlaneError, match="holds no block"):
        Segment.create(segment_dir, EPOCH, SHAPE, SHAPE.block_bytes - 1)
    with pytest.raises(PlaneError, match="cannot reserve"):
        Segment.create(segment_dir, EPOCH, replace(SHAPE, block_tokens=1 << 20), 1 << 55)
    with pytest.raises(PlaneError, match="No such file"):
        Segment.create(segment_dir / "absent", EPOCH, SHAPE, POOL_BYTES)
    assert list(segment_dir.iterdir()) == []


def test_socket_path_too_long_is_said(segment_dir: Path) -> None:
    deep = segment_dir / ("d" * 90)
    deep.mkdir()
    with pytest.raises(PlaneError, match="at most 107 bytes"):
        Segment.create(deep, EPOCH, SHAPE, POOL_BYTES)
    assert list(deep.iterdir()) == []


def test_wait_times_out_while_the_owner_lives(segment: Segment) -> None:
    plane = attach(segment)
    plane.wait(0, 0.0)  # nothing was submitted
    plane.submit(0)
    with pytest.raises(PlaneTimeoutError, match=r"within 0\.05 s"):
        plane.wait(0, 0.05)
    with pytest.raises(PlaneTimeoutError, match="no report"):
        plane.finish(0.05)
    plane.close()


def test_an_iteration_from_begin_to_finish(segment: Segment) -> None:
    socket = owner_socket(segment)
    plane = attach(segment)
    assert decode_descriptor(socket.recv()).sub_batches == ()
    batch = CpuSubBatch(1, np.array([3], np.int32), np.array([[2]], np.int32))
    plane.submit(1)
    plane.begin(6, [batch], 4)
    descriptor = decode_descriptor(socket.recv())
    assert (descriptor.epoch, descriptor.iteration, descriptor.host_blocks_used) == (EPOCH, 6, 4)
    assert descriptor.layers == range(3)
    assert descriptor.sub_batches[0].first_submit == 1
    # A report of an iteration that was given up comes first, and is not taken for this one's.
    socket.send(encode_report(WorkReport(EPOCH, Report(5, 1, 1))))
    socket.send(encode_report(WorkReport(EPOCH, Report(6, 30, 4), 1)))
    assert plane.finish(5.0) == Report(6, 30, 4)
    plane.close()
    socket.close()


def test_refusal_ends_the_wait_with_its_reason(segment: Segment) -> None:
    socket = owner_socket(segment)
    plane = attach(segment)
    plane.begin(6, [CpuSubBatch(0, np.array([3], np.int32), np.array([[2]], np.int32))], 1)
    plane.submit(0)

    def refuse() -> None:
        segment.region.refuse(6)
        text = "sequence 0: block 2 of 2"
        socket.send(encode_report(WorkReport(EPOCH, Report(6, 0, 0), 0, WorkError.INVALID_DESCRIPTOR, text)))

    timer = threading.Timer(0.05, refuse)
    timer.start()
    with pytest.raises(PlaneError, match="iteration 6 was refused: sequence 0: block 2 of 2"):
        plane.wait(0, 10.0)
    timer.join()
    plane.close()
    socket.close()


def test_owner_that_closes_ends_the_wait(segment: Segment) -> None:
    plane = attach(segment)
    plane.submit(0)
    timer = threading.Timer(0.05, segment.close)
    timer.start()
    with pytest.raises(PeerLostError):
        plane.wait(0, 10.0)
    timer.join()
    assert not plane.peer_alive()
    plane.close()


def heads(array: np.ndarray, *shape: int) -> np.ndarray:  # type: ignore[type-arg]
    """Random values in that shape and in the array's type."""
    return np.random.default_rng(0).integers(1, 1000, shape).astype(array.dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows_of_any_strides_reach_the_slot(segment_dir: Path, dtype: str) -> None:
    shape = replace(SHAPE, exchange_dtype=dtype)
    segment = Segment.create(segment_dir, EPOCH, shape, POOL_BYTES)
    plane = attach(segment, shape=shape)
    fused = heads(plane.q(0), 7, 10, 40)  # q, k and v beside one another, as one matrix product leaves them
    for view in (np.ascontiguousarray, np.asarray, lambda part: np.repeat(part, 2, axis=1)[:, ::2]):
        q, kv = view(fused[:, :6]), view(fused[:, 6:]).reshape(7, 2, 2, 40)
        plane.submit_rows(1, q, kv, 2, 4)
        np.testing.assert_array_equal(plane.q(1)[:4], q[2:6])
        np.testing.assert_array_equal(plane.k(1)[:4], kv[2:6, 0])
        np.testing.assert_array_equal(plane.v(1)[:4], kv[2:6, 1])
        assert not plane.q(1)[4:].any()
    plane.close()
    segment.close()


def test_tensors_of_torch_are_read_in_place(segment: Segment) -> None:
    plane = attach(segment)
    fused = torch.randn(5, 400)
    q, kv = fused[:, :240].view(5, 6, 40), fused[:, 240:].view(5, 2, 2, 40)
    plane.submit_rows(0, q, kv, 1, 3)
    np.testing.assert_array_equal(plane.q(0)[:3], q[1:4].numpy())
    np.testing.assert_array_equal(plane.v(0)[:3], kv[1:4, 1].numpy())
    with pytest.raises(PlaneError, match="q is not of the exchange's type"):
        plane.submit_rows(0, q.to(torch.bfloat16), kv, 1, 3)
    plane.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((5, 6, 40), np.float64)}, "q is not of the exchange's type"),
        ({"q": np.zeros((5, 6, 40), np.int32)}, "q is not of the exchange's type"),
        ({"q": np.zeros((5, 240), np.float32)}, "q has another number of axes"),
        ({"q": np.zeros((5, 5, 40), np.float32)}, "q has other heads"),
        ({"q": np.zeros((5, 6, 80), np.float32)[:, :, ::2]}, "q is not contiguous in its last axis"),
        ({"q": [1.0]}, "q is no writable array"),
        ({"kv": np.zeros((5, 3, 2, 40), np.float32)}, "kv is not K and V"),
        ({"kv": np.zeros((5, 2, 2, 41), np.float32)}, "kv has other heads"),
        ({"kv": np.zeros((4, 2, 2, 40), np.float32)}, "kv has not all of these rows"),
        ({"first_row": -1}, "q has not all"),
        ({"first_row": 2**63 - 1}, "q has not all"),
        ({"num_rows": -1}, "q has not all"),
        ({"num_rows": 6, "first_row": 0, "q": np.zeros((6, 6, 40), np.float32)}, "more rows than fit into a slot"),
    ],
)
def test_nothing_else_is_submitted(segment: Segment, change: dict[str, object], message: str) -> None:
    plane = attach(segment)
    good = {"q": np.ones((5, 6, 40), np.float32), "kv": np.ones((5, 2, 2, 40), np.float32)}
    arguments = good | {"first_row": 1, "num_rows": 4} | change
    with pytest.raises(PlaneError, match=message):
        plane.submit_rows(0, **arguments)  # type: ignore[arg-type]
    plane.wait(0, 0.0)  # nothing was submitted
    assert not plane.q(0).any()
    with pytest.raises(PlaneError, match="out has not all of these rows"):
        plane.wait_rows(0, np.zeros((4, 6, 40), np.float32), 1, 4, 0.0)
    frozen = np.zeros((5, 6, 40), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(PlaneError, match="out is no writable array"):
        plane.wait_rows(0, frozen, 0, 1, 0.0)
    plane.close()
