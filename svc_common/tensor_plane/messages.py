"""The two messages of an iteration in their fixed little-endian layout: descriptor down, report up.

descriptor: header | one sub-batch after another, in the order in which each layer submits them
sub-batch:  header | context_tokens int32[n] | block_tables int32[n, stride]
report:     header | times_ns uint64[num_times] | text in UTF-8
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from svc_common.tensor_plane.errors import PlaneError

VERSION = 3
_DESCRIPTOR_MAGIC = 0x4449464E  # "NFID"
_REPORT_MAGIC = 0x5249464E  # "NFIR"
# magic, version, num_sub_batches, epoch, iteration, host_blocks_used, first_layer, num_layers, trace
_DESCRIPTOR = struct.Struct("<IHHQQiiiI")
# slot, first_submit, num_sequences, stride
_SUB_BATCH = struct.Struct("<iIII")
# magic, version, error, epoch, iteration, compute_ns, wait_ns, iterations, text_bytes, num_times
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
class Descriptor:
    """What the worker is to compute in one iteration."""

    epoch: int
    iteration: int
    host_blocks_used: int
    """Blocks owned by sequences, for accounting."""
    sub_batches: tuple[SubmittedSubBatch, ...]
    """In the order in which each layer submits them. None: nothing to compute, and no report."""
    layers: range = range(0)
    """What it takes the sub-batches through."""
    trace: bool = False
    """Whether the report is to say what was done when."""


@dataclass(frozen=True)
class Report:
    """What the worker did in one iteration."""

    iteration: int
    compute_ns: int
    """Time it computed."""
    wait_ns: int
    """Time it waited for submits."""
    times_ns: tuple[int, ...] = ()
    """Where the descriptor asked for a trace, three for each sub-batch of each layer, in the order computed: when it
    began to wait for the submit, to attend, and when it had attended. CLOCK_MONOTONIC."""


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
        )
    ]
    for submitted in descriptor.sub_batches:
        batch = submitted.batch
        num_sequences, stride = batch.block_tables.shape
        if batch.context_tokens.shape != (num_sequences,):
            raise PlaneError(f"context_tokens {batch.context_tokens.shape} beside block_tables of {num_sequences}")
        parts.append(_SUB_BATCH.pack(batch.slot, submitted.first_submit, num_sequences, stride))
        parts.append(np.ascontiguousarray(batch.context_tokens, dtype="<i4").tobytes())
        parts.append(np.ascontiguousarray(batch.block_tables, dtype="<i4").tobytes())
    return b"".join(parts)


def decode_descriptor(message: bytes) -> Descriptor:
    """Checks magic, version and length; what the numbers mean is checked against the region by the worker."""
    if len(message) < _DESCRIPTOR.size:
        raise PlaneError(f"descriptor of {len(message)} bytes is cut short")
    magic, version, num_sub_batches, *numbers = _DESCRIPTOR.unpack_from(message)
    _check_kind("descriptor", magic, _DESCRIPTOR_MAGIC, version)
    epoch, iteration, host_blocks_used, first_layer, num_layers, trace = numbers
    offset = _DESCRIPTOR.size
    sub_batches = []
    for _ in range(num_sub_batches):
        if len(message) < offset + _SUB_BATCH.size:
            raise PlaneError(f"descriptor of {len(message)} bytes is cut short")
        slot, first_submit, num_sequences, stride = _SUB_BATCH.unpack_from(message, offset)
        offset += _SUB_BATCH.size
        if len(message) < offset + 4 * num_sequences * (1 + stride):
            raise PlaneError(f"descriptor of {len(message)} bytes is cut short")
        context_tokens = np.frombuffer(message, "<i4", num_sequences, offset)
        offset += context_tokens.nbytes
        block_tables = np.frombuffer(message, "<i4", num_sequences * stride, offset).reshape(num_sequences, stride)
        offset += block_tables.nbytes
        sub_batches.append(SubmittedSubBatch(CpuSubBatch(slot, context_tokens, block_tables), first_submit))
    if offset != len(message):
        raise PlaneError(f"descriptor has {len(message) - offset} bytes too many")
    layers = range(first_layer, first_layer + num_layers)
    return Descriptor(epoch, iteration, host_blocks_used, tuple(sub_batches), layers, bool(trace))


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
        len(report.times_ns),
    )
    return header + struct.pack(f"<{len(report.times_ns)}Q", *report.times_ns) + text


def decode_report(message: bytes) -> WorkReport:
    if len(message) < _REPORT.size:
        raise PlaneError(f"report of {len(message)} bytes is cut short")
    magic, version, error, *numbers = _REPORT.unpack_from(message)
    _check_kind("report", magic, _REPORT_MAGIC, version)
    epoch, iteration, compute_ns, wait_ns, iterations, text_bytes, num_times = numbers
    num_bytes = _REPORT.size + 8 * num_times + text_bytes
    if len(message) != num_bytes:
        raise PlaneError(f"report has {len(message)} bytes, its header says {num_bytes}")
    times_ns = struct.unpack_from(f"<{num_times}Q", message, _REPORT.size)
    text = message[num_bytes - text_bytes :]
    report = Report(iteration, compute_ns, wait_ns, times_ns)
    return WorkReport(epoch, report, iterations, WorkError(error), text.decode(errors="replace"))


def _check_kind(what: str, magic: int, expected_magic: int, version: int) -> None:
    if magic != expected_magic:
        raise PlaneError(f"not a {what}")
    if version != VERSION:
        raise PlaneError(f"{what} version {version}, this side has {VERSION}")
