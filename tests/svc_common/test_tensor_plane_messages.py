import struct

import numpy as np
import pytest

from svc_common.tensor_plane import CpuSubBatch, EventKind, LayerBatch, PlaneError, Report, WorkEvent
from svc_common.tensor_plane.messages import (
    Descriptor,
    SubmittedSubBatch,
    WorkError,
    WorkReport,
    decode_descriptor,
    decode_report,
    encode_descriptor,
    encode_report,
)


def two_sub_batches() -> Descriptor:
    first = CpuSubBatch(0, np.array([5, 17], np.int32), np.array([[3, -1], [7, 2]], np.int32))
    second = CpuSubBatch(1, np.array([1], np.int32), np.array([[0, 0, 9]], np.int32))
    submitted = (SubmittedSubBatch(first, 2**32 - 1), SubmittedSubBatch(second, 0))
    layers = LayerBatch(
        first_row=6,
        num_layers=2,
        chunk_starts=np.array([0, 9], np.int32),
        chunk_tokens=np.array([4, 1], np.int32),
        context_tokens=np.array([8], np.int32),
        block_tables=np.array([[5, 6], [7, 8], [9, 1]], np.int32),
    )
    return Descriptor(2**40 + 1, 77, 12, submitted, range(3, 8), False, (layers,), 2**32 - 2, True, True)


def test_descriptor_keeps_its_values() -> None:
    decoded = decode_descriptor(encode_descriptor(two_sub_batches()))
    assert (decoded.epoch, decoded.iteration, decoded.host_blocks_used) == (2**40 + 1, 77, 12)
    assert decoded.layers == range(3, 8)
    assert [(s.batch.slot, s.first_submit) for s in decoded.sub_batches] == [(0, 2**32 - 1), (1, 0)]
    assert decoded.sub_batches[0].batch.context_tokens.tolist() == [5, 17]
    assert decoded.sub_batches[0].batch.block_tables.tolist() == [[3, -1], [7, 2]]
    assert decoded.sub_batches[1].batch.block_tables.tolist() == [[0, 0, 9]]
    assert (decoded.first_layer_batch, decoded.in_turn, decoded.device_rings, decoded.trace) == (
        2**32 - 2,
        True,
        True,
        False,
    )
    (layers,) = decoded.layer_batches
    assert (layers.first_row, layers.num_layers, layers.num_tokens) == (6, 2, 6)
    assert (layers.chunk_starts.tolist(), layers.chunk_tokens.tolist()) == ([0, 9], [4, 1])
    assert layers.context_tokens.tolist() == [8]
    assert layers.block_tables.tolist() == [[5, 6], [7, 8], [9, 1]]


def test_descriptor_is_little_endian_and_fixed() -> None:
    batch = CpuSubBatch(1, np.array([300], np.int32), np.array([[4]], np.int32))
    message = encode_descriptor(
        Descriptor(2, 3, 4, (SubmittedSubBatch(batch, 5),), range(6, 13), trace=True, device_rings=True)
    )
    expected = (b"NFID", 5, 1, 2, 3, 4, 6, 7, 1, 0, 0, 0, 1, 1, 5, 1, 1, 300, 4)
    assert message == struct.pack("<4sHHQQiiiIIIIIiIIIii", *expected)


def test_descriptor_without_work() -> None:
    assert decode_descriptor(encode_descriptor(Descriptor(1, 2, 3, ()))) == Descriptor(1, 2, 3, ())


def test_descriptor_asks_for_a_trace() -> None:
    assert decode_descriptor(encode_descriptor(Descriptor(1, 2, 3, (), trace=True))).trace


def test_tables_of_another_integer_type_or_order_are_converted() -> None:
    tables = np.asfortranarray(np.array([[1, 2], [3, 4]], np.int64))
    batch = CpuSubBatch(0, np.array([1, 2], np.int64), tables)  # type: ignore[arg-type]
    decoded = decode_descriptor(encode_descriptor(Descriptor(1, 1, 0, (SubmittedSubBatch(batch, 0),))))
    assert decoded.sub_batches[0].batch.block_tables.tolist() == [[1, 2], [3, 4]]


def test_any_cut_or_addition_is_refused() -> None:
    message = encode_descriptor(two_sub_batches())
    for length in range(len(message)):
        with pytest.raises(PlaneError, match="cut short"):
            decode_descriptor(message[:length])
    with pytest.raises(PlaneError, match="1 bytes too many"):
        decode_descriptor(message + b"\0")


def test_sizes_that_overflow_are_refused() -> None:
    header = encode_descriptor(Descriptor(1, 1, 0, ()))
    message = header[:6] + struct.pack("<H", 1) + header[8:] + struct.pack("<iIII", 0, 0, 2**32 - 1, 2**32 - 1)
    with pytest.raises(PlaneError, match="cut short"):
        decode_descriptor(message)


def test_other_kinds_and_versions_are_refused() -> None:
    message = encode_descriptor(two_sub_batches())
    with pytest.raises(PlaneError, match="not a descriptor"):
        decode_descriptor(b"XXXX" + message[4:])
    with pytest.raises(PlaneError, match="descriptor version 9, this side has 5"):
        decode_descriptor(message[:4] + struct.pack("<H", 9) + message[6:])
    with pytest.raises(PlaneError, match="not a report"):
        decode_report(message)


def test_context_and_tables_of_different_lengths_are_refused() -> None:
    batch = CpuSubBatch(0, np.array([1, 2, 3], np.int32), np.array([[1], [2]], np.int32))
    with pytest.raises(PlaneError, match="block_tables of 2"):
        encode_descriptor(Descriptor(1, 1, 0, (SubmittedSubBatch(batch, 0),)))


def test_layer_batches_of_different_lengths_are_refused() -> None:
    none, one = np.zeros(0, np.int32), np.ones(1, np.int32)
    layers = LayerBatch(0, 1, one, one, one, np.ones((1, 1), np.int32))
    with pytest.raises(PlaneError, match="block_tables of 1 beside 1 chunks and 1 decodes"):
        encode_descriptor(Descriptor(1, 1, 0, (), layer_batches=(layers,)))
    layers = LayerBatch(0, 1, one, none, none, np.ones((1, 1), np.int32))
    with pytest.raises(PlaneError, match="beside 1 chunks"):
        encode_descriptor(Descriptor(1, 1, 0, (), layer_batches=(layers,)))


def test_report_keeps_its_values() -> None:
    work = WorkReport(9, Report(8, 2**33, 7), 6, WorkError.INVALID_DESCRIPTOR, "block 5 of 4 – refused")
    assert decode_report(encode_report(work)) == work
    with pytest.raises(PlaneError, match="cut short"):
        decode_report(encode_report(work)[:20])
    with pytest.raises(PlaneError, match="report has 79 bytes, its header says 80"):
        decode_report(encode_report(work)[:-1])


def test_report_carries_events_before_its_text() -> None:
    work = WorkReport(9, Report(8, 5, 7, ((2**32 + 3 * 2**16 + 30, 3, 2**63, 4),)), 6, WorkError.NONE, "no text")
    message = encode_report(work)
    assert message[56:] == struct.pack("<4Q", 2**32 + 3 * 2**16 + 30, 3, 2**63, 4) + b"no text"
    assert WorkEvent.of(*work.report.events[0]) == WorkEvent(EventKind.LAYER, 3, 30, 3, 2**63, 4)
    assert decode_report(message) == work
    with pytest.raises(PlaneError, match="its header says"):
        decode_report(message[:60])
