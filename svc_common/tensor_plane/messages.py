"""The two messages of an iteration in their fixed little-endian layout: descriptor down, report up.

descriptor: header | one sub-batch after another, in the order in which each layer submits them | one layer batch after
            another, in the order in which they pass the CPU layers
sub-batch:  header | context_tokens int32[n] | block_tables int32[n, stride]
layer batch: header | chunk_starts int32[c] | chunk_tokens int32[c] | context_tokens int32[d] |
            block_tables int32[c + d, stride]
report:     header | events uint64[num_events, 4] | text in UTF-8
"""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from svc_common.tensor_plane.errors import PlaneError

VERSION = 5
MAX_MESSAGE_BYTES = 256 * 2**20
"""Tables of 4,096 sequences of 16,384 blocks each; ZeroMQ hangs up on who sends more."""
_DESCRIPTOR_MAGIC = 0x4449464E  # "NFID"
_REPORT_MAGIC = 0x5249464E  # "NFIR"
# magic, version, num_sub_batches, epoch, iteration, host_blocks_used, first_layer, num_layers, trace,
# num_layer_batches, first_layer_batch, in_turn, device_rings
_DESCRIPTOR = struct.Struct("<IHHQQiiiIIIII")
# slot, first_submit, num_sequences, stride
_SUB_BATCH = struct.Struct("<iIII")
# first_row, num_layers, num_chunks, num_decodes, stride
_LAYER_BATCH = struct.Struct("<iiIII")
# magic, version, error, epoch, iteration, compute_ns, wait_ns, iterations, text_bytes, num_events
_REPORT = struct.Struct("<IHHQQQQQII")

Int32Array = npt.NDArray[np.int32]


class WorkError(IntEnum):
    """Why the worker did not compute an iteration."""

    NONE = 0
    STALE_EPOCH = 1
    INVALID_DESCRIPTOR = 2
    INTERRUPTED = 3


@dataclass(frozen=True)
class CpuSubBatch:
    """Decodes whose q, k and v the executor puts into one exchange slot, layer by layer."""

    slot: int
    context_tokens: Int32Array
    """[num_sequences] tokens each query sees, the new one included, whose k and v are in the slot."""
    block_tables: Int32Array
    """[num_sequences, stride] blocks of each sequence in order; entries past its last block are not read."""


@dataclass(frozen=True)
class SubmittedSubBatch:
    """A sub-batch as the worker gets it."""

    batch: CpuSubBatch
    first_submit: int
    """Number on the slot's doorbell before the iteration's first submit."""


@dataclass(frozen=True)
class LayerBatch:
    """Tokens that pass the CPU layers together: chunks of prompts, then one token of each decode."""

    first_row: int
    """Of their hidden states in the region."""
    num_layers: int
    """That they pass, the first of the model."""
    chunk_starts: Int32Array
    """[num_chunks] tokens of the prompt before the chunk."""
    chunk_tokens: Int32Array
    """[num_chunks]"""
    context_tokens: Int32Array
    """[num_decodes] tokens each query sees, the new one included."""
    block_tables: Int32Array
    """[num_chunks + num_decodes, stride] blocks of each sequence in the lower pool, in order."""

    @property
    def num_tokens(self) -> int:
        return int(self.chunk_tokens.sum()) + len(self.context_tokens)


@dataclass(frozen=True)
class Descriptor:
    """What the worker is to compute in one iteration."""

    epoch: int
    iteration: int
    host_blocks_used: int
    """Blocks owned by sequences, for accounting."""
    sub_batches: tuple[SubmittedSubBatch, ...]
    """In the order in which each layer submits them."""
    layers: range = range(0)
    """What it attends for the sub-batches in."""
    trace: bool = False
    """Whether the report is to say what was done when."""
    layer_batches: tuple[LayerBatch, ...] = ()
    """In the order in which they pass the CPU layers."""
    first_layer_batch: int = 0
    """Number on the layers' doorbell before the iteration."""
    in_turn: bool = False
    """All layers of one sub-batch are submitted before those of the next; else each layer of all before the next."""
    device_rings: bool = False
    """A device's stream submits the sub-batches and awaits their answers: it wakes nobody. All slots' doorbells start
    from 0."""

    @property
    def has_work(self) -> bool:
        """Else there is nothing to compute, and no report."""
        return bool(self.sub_batches or self.layer_batches)


class EventKind(IntEnum):
    """What an event of a report is about; see csrc of cpu_attn_svc."""

    ATTENTION = 0
    LAYER = 1


@dataclass(frozen=True, slots=True)
class WorkEvent:
    """A piece of work. Times are CLOCK_MONOTONIC."""

    kind: EventKind
    index: int
    """Of the sub-batch or layer batch in its descriptor."""
    layer: int
    waiting_ns: int
    """When the worker began to wait for it,"""
    start_ns: int
    """to compute it,"""
    end_ns: int
    """and had computed it."""

    @classmethod
    def of(cls, code: int, waiting_ns: int, start_ns: int, end_ns: int) -> "WorkEvent":
        """Of an event as the worker notes it. Raises ValueError where its kind is unknown."""
        return cls(EventKind(code >> 32), code >> 16 & 0xFFFF, code & 0xFFFF, waiting_ns, start_ns, end_ns)


@dataclass(frozen=True)
class Report:
    """What the worker did in one iteration."""

    iteration: int
    compute_ns: int
    """Time it computed."""
    wait_ns: int
    """Time it waited for submits."""
    events: tuple[tuple[int, int, int, int], ...] = ()
    """Where the descriptor asked for a trace, what was computed, in order; arguments of WorkEvent.of."""


@dataclass(frozen=True)
class WorkReport:
    """A report as it travels."""

    epoch: int
    report: Report
    iterations: int = 0
    """Computed in this epoch so far."""
    error: WorkError = WorkError.NONE
    text: str = ""


def encode_descriptor(descriptor: Descriptor) -> bytes:
    parts = [
        _DESCRIPTOR.pack(
            _DESCRIPTOR_MAGIC,
            VERSION,
            len(descriptor.sub_batches),
            descriptor.epoch,
            descriptor.iteration,
            descriptor.host_blocks_used,
            descriptor.layers.start,
            len(descriptor.layers),
            descriptor.trace,
            len(descriptor.layer_batches),
            descriptor.first_layer_batch,
            descriptor.in_turn,
            descriptor.device_rings,
        )
    ]
    for submitted in descriptor.sub_batches:
        batch = submitted.batch
        num_sequences, stride = batch.block_tables.shape
        if batch.context_tokens.shape != (num_sequences,):
            raise PlaneError(f"context_tokens {batch.context_tokens.shape} beside block_tables of {num_sequences}")
        parts.append(_SUB_BATCH.pack(batch.slot, submitted.first_submit, num_sequences, stride))
        parts += map(_bytes, (batch.context_tokens, batch.block_tables))
    for passing in descriptor.layer_batches:
        num_chunks, num_decodes = len(passing.chunk_starts), len(passing.context_tokens)
        rows, stride = passing.block_tables.shape
        if len(passing.chunk_tokens) != num_chunks or rows != num_chunks + num_decodes:
            raise PlaneError(f"block_tables of {rows} beside {num_chunks} chunks and {num_decodes} decodes")
        parts.append(_LAYER_BATCH.pack(passing.first_row, passing.num_layers, num_chunks, num_decodes, stride))
        arrays = (passing.chunk_starts, passing.chunk_tokens, passing.context_tokens, passing.block_tables)
        parts += map(_bytes, arrays)
    return b"".join(parts)


def _bytes(array: Int32Array) -> bytes:
    return np.ascontiguousarray(array, dtype="<i4").tobytes()


class _Reader:
    """Takes a descriptor's parts one after the other. Raises PlaneError where it is too short."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._offset = 0

    @property
    def num_left(self) -> int:
        return len(self._message) - self._offset

    def header(self, layout: struct.Struct) -> tuple[int, ...]:
        self._check(layout.size)
        numbers = layout.unpack_from(self._message, self._offset)
        self._offset += layout.size
        return numbers

    def array(self, *shape: int) -> Int32Array:
        count = math.prod(shape)
        self._check(4 * count)
        array = np.frombuffer(self._message, "<i4", count, self._offset).reshape(shape)
        self._offset += array.nbytes
        return array

    def _check(self, num_bytes: int) -> None:
        if self.num_left < num_bytes:
            raise PlaneError(f"descriptor of {len(self._message)} bytes is cut short")


def decode_descriptor(message: bytes) -> Descriptor:
    """Checks magic, version and length; what the numbers mean is checked against the region by the worker."""
    reader = _Reader(message)
    magic, version, num_sub_batches, *numbers = reader.header(_DESCRIPTOR)
    _check_kind("descriptor", magic, _DESCRIPTOR_MAGIC, version)
    epoch, iteration, host_blocks_used, first_layer, num_layers, trace, num_layer_batches, first_batch, *flags = numbers
    in_turn, device_rings = map(bool, flags)
    sub_batches = []
    for _ in range(num_sub_batches):
        slot, first_submit, num_sequences, stride = reader.header(_SUB_BATCH)
        batch = CpuSubBatch(slot, reader.array(num_sequences), reader.array(num_sequences, stride))
        sub_batches.append(SubmittedSubBatch(batch, first_submit))
    layer_batches = []
    for _ in range(num_layer_batches):
        first_row, passed, num_chunks, num_decodes, stride = reader.header(_LAYER_BATCH)
        starts, tokens, contexts = reader.array(num_chunks), reader.array(num_chunks), reader.array(num_decodes)
        tables = reader.array(num_chunks + num_decodes, stride)
        layer_batches.append(LayerBatch(first_row, passed, starts, tokens, contexts, tables))
    if reader.num_left:
        raise PlaneError(f"descriptor has {reader.num_left} bytes too many")
    layers = range(first_layer, first_layer + num_layers)
    return Descriptor(
        epoch,
        iteration,
        host_blocks_used,
        tuple(sub_batches),
        layers,
        bool(trace),
        tuple(layer_batches),
        first_batch,
        in_turn,
        device_rings,
    )


def encode_report(work: WorkReport) -> bytes:
    text = work.text.encode()
    report = work.report
    header = _REPORT.pack(
        _REPORT_MAGIC,
        VERSION,
        work.error,
        work.epoch,
        report.iteration,
        report.compute_ns,
        report.wait_ns,
        work.iterations,
        len(text),
        len(report.events),
    )
    return header + np.array(report.events, "<u8").tobytes() + text


def decode_report(message: bytes) -> WorkReport:
    if len(message) < _REPORT.size:
        raise PlaneError(f"report of {len(message)} bytes is cut short")
    magic, version, error, *numbers = _REPORT.unpack_from(message)
    _check_kind("report", magic, _REPORT_MAGIC, version)
    epoch, iteration, compute_ns, wait_ns, iterations, text_bytes, num_events = numbers
    num_bytes = _REPORT.size + 32 * num_events + text_bytes
    if len(message) != num_bytes:
        raise PlaneError(f"report has {len(message)} bytes, its header says {num_bytes}")
    events = np.frombuffer(message, "<u8", 4 * num_events, _REPORT.size).reshape(-1, 4).tolist()
    text = message[num_bytes - text_bytes :]
    report = Report(iteration, compute_ns, wait_ns, tuple(map(tuple, events)))
    return WorkReport(epoch, report, iterations, WorkError(error), text.decode(errors="replace"))


def _check_kind(what: str, magic: int, expected_magic: int, version: int) -> None:
    if magic != expected_magic:
        raise PlaneError(f"not a {what}")
    if version != VERSION:
        raise PlaneError(f"{what} version {version}, this side has {VERSION}")
