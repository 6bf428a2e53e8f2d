"""The executor's side of the tensor plane: per iteration `begin` and `finish`, per layer `submit` and `wait`."""

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import zmq

from svc_common.tensor_plane import _plane
from svc_common.tensor_plane._plane import Outcome
from svc_common.tensor_plane.errors import PeerLostError, PlaneError, PlaneTimeoutError
from svc_common.tensor_plane.messages import (
    MAX_MESSAGE_BYTES,
    CpuSubBatch,
    Descriptor,
    LayerBatch,
    Report,
    SubmittedSubBatch,
    WorkError,
    WorkReport,
    decode_report,
    encode_descriptor,
)
from svc_common.tensor_plane.shape import RegionShape, numpy_dtype

# A sleeping receiver looks this often whether its peer lives.
_PEER_CHECK_MS = 20
# Between a refusal in the region and the report that says why.
_REFUSAL_TEXT_S = 1.0

Array = npt.NDArray[Any]


class TensorPlane:
    """One attached region. Used by one thread at a time; by any: `peer_alive`, `outlook`, `numbers`, `release_device`.

    Per layer, slots are submitted in the order in which `begin` named them. Arrays are views of the region: writes to
    `q`, `k` and `v` of a slot belong between its `wait` and its next `submit`, reads of `out` after its `wait`.
    They stay valid after `close`.

    Where a device rings, its stream writes and awaits the numbers at `word_offsets` instead of `submit` and `wait`.
    """

    memory: npt.NDArray[np.uint8]
    """[region's bytes] that are mapped."""

    pool: Array
    """[num_layers - num_cpu_layers, num_blocks, 2 (K, V), num_kv_heads, block_tokens * head_dim], see csrc/layout.h;
    bf16 as uint16."""
    scales: Array | None
    """[num_layers - num_cpu_layers, num_blocks, 2 (K, V), num_kv_heads], fp32, of a pool in int8."""
    lower: Array
    """Like `pool`, of the CPU layers: [num_cpu_layers, num_gpu_blocks + num_blocks, ...]."""
    lower_scales: Array | None
    hidden: Array
    """[max_tokens, hidden_size], fp32, what passes the CPU layers; empty where there are none."""
    num_blocks: int

    def __init__(self, region: _plane.Region, socket: zmq.Socket[bytes], shape: RegionShape) -> None:
        """Use `attach`."""
        self._region = region
        self._socket = socket
        self._exchange = _plane.Exchange(region)
        self._iteration = 0
        self._upper_layers = range(shape.num_cpu_layers, shape.num_layers)
        self._num_layer_batches = 0
        self.num_blocks = region.num_blocks
        self.memory = memory = region.memory()
        block = (2, shape.num_kv_heads, shape.block_tokens * shape.head_dim)
        kv_dtype, fp32 = numpy_dtype(shape.kv_dtype), np.dtype(np.float32)
        self.pool = _view(memory, region.pool_offset, kv_dtype, (len(self._upper_layers), region.num_blocks, *block))
        self.lower = _view(
            memory, region.lower_offset, kv_dtype, (shape.num_cpu_layers, region.num_lower_blocks, *block)
        )
        self.scales = self.lower_scales = None
        if shape.kv_dtype == "int8":
            self.scales = _view(memory, region.scales_offset, fp32, self.pool.shape[:-1])
            self.lower_scales = _view(memory, region.lower_scales_offset, fp32, self.lower.shape[:-1])
        num_rows = shape.max_tokens if shape.num_cpu_layers else 0
        self.hidden = _view(memory, region.hidden_offset, fp32, (num_rows, shape.hidden_size))
        self._slots = [_slot_views(memory, region.slot_offsets(slot), shape) for slot in range(_plane.NUM_SLOTS)]

    @classmethod
    def attach(cls, path: str, endpoint: str, epoch: int, shape: RegionShape) -> "TensorPlane":
        """Maps the region that OpenRegion named. Raises PlaneError where it is not the one asked for."""
        region = _plane.Region.attach(path, epoch, shape.to_native())
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            socket.connect(endpoint)
            # Says that the region is mapped, so that its name can go.
            socket.send(encode_descriptor(Descriptor(epoch, 0, 0, ())))
        except zmq.ZMQError as error:
            socket.close()
            region.close()
            raise PlaneError(f"{endpoint}: {error}") from error
        return cls(region, socket, shape)

    def q(self, slot: int) -> Array:
        """[max_sequences, num_q_heads, head_dim], exchange dtype."""
        return self._slots[slot][0]

    def k(self, slot: int) -> Array:
        """[max_sequences, num_kv_heads, head_dim], exchange dtype."""
        return self._slots[slot][1]

    def v(self, slot: int) -> Array:
        """[max_sequences, num_kv_heads, head_dim], exchange dtype."""
        return self._slots[slot][2]

    def out(self, slot: int) -> Array:
        """[max_sequences, num_q_heads, head_dim], exchange dtype."""
        return self._slots[slot][3]

    def begin(
        self,
        iteration: int,
        sub_batches: Sequence[CpuSubBatch],
        host_blocks_used: int,
        trace: bool = False,
        layers: range | None = None,
        layer_batches: Sequence[LayerBatch] = (),
        in_turn: bool = False,
        device_rings: bool = False,
    ) -> None:
        """Describes an iteration: attention for its sub-batches in `layers`, or in all above the CPU layers, and what
        passes those. `in_turn` and `device_rings`: as of Descriptor.

        Without any it only accounts for blocks, and `finish` must not follow.
        """
        self._iteration = iteration
        self._num_layer_batches = len(layer_batches)
        self._exchange.begin(iteration, device_rings)
        submitted = tuple(SubmittedSubBatch(batch, self._exchange.num_submits(batch.slot)) for batch in sub_batches)
        message = encode_descriptor(
            Descriptor(
                self._region.epoch,
                iteration,
                host_blocks_used,
                submitted,
                self._upper_layers if layers is None else layers,
                trace,
                tuple(layer_batches),
                self._exchange.num_layer_batches,
                in_turn,
                device_rings,
            )
        )
        if len(message) > MAX_MESSAGE_BYTES:
            raise PlaneError(f"the descriptor has {len(message)} bytes, at most {MAX_MESSAGE_BYTES} are taken")
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            if not self.peer_alive():
                raise PeerLostError("the CPU attention service is gone") from None
            raise PlaneTimeoutError("the CPU attention service takes no more descriptors") from None

    def submit(self, slot: int) -> None:
        """q, k and v of this slot's next layer are in place."""
        self._exchange.ring(slot)

    def submit_rows(self, slot: int, q: object, kv: object, first_row: int, num_rows: int) -> None:
        """Copies rows of q [n, num_q_heads, head_dim] and kv [n, 2, num_kv_heads, head_dim] into the slot and submits.

        CPU tensors or arrays of the exchange dtype, of any strides but in the last axis. Raises PlaneError where they
        are not that.
        """
        self._exchange.submit(slot, q, kv, first_row, num_rows)

    def wait(self, slot: int, timeout_s: float) -> None:
        """Returns once `out` holds the answer to this slot's last submit."""
        outcome = self._exchange.wait(slot, timeout_s)
        if outcome is not Outcome.COMPLETED:
            self.raise_for(outcome, timeout_s)

    def wait_rows(self, slot: int, out: object, first_row: int, num_rows: int, timeout_s: float) -> None:
        """Waits, then copies the answer into rows of out [n, num_q_heads, head_dim], a tensor as in `submit_rows`."""
        outcome = self._exchange.wait_and_take(slot, out, first_row, num_rows, timeout_s)
        if outcome is not Outcome.COMPLETED:
            self.raise_for(outcome, timeout_s)

    def submit_layers(self) -> None:
        """The hidden states of all the iteration's layer batches are in place."""
        self._exchange.submit_layers(self._num_layer_batches)

    def wait_layers(self, index: int, timeout_s: float) -> None:
        """Returns once a layer batch, by its place in `begin`, is through: `hidden` is what the CPU layers made."""
        before = self._exchange.num_layer_batches - self._num_layer_batches
        outcome = self._exchange.wait_layers((before + index + 1) % 2**32, timeout_s)
        if outcome is not Outcome.COMPLETED:
            self.raise_for(outcome, timeout_s)

    @property
    def wait_ns(self) -> int:
        """Spent in waits so far."""
        return self._exchange.waited_ns

    def word_offsets(self, slot: int) -> tuple[int, int]:
        """Where in `memory` a slot's 32-bit numbers lie: of what is submitted, and of what is completed."""
        return self._region.word_offsets(slot)

    def numbers(self, slot: int) -> tuple[int, int]:
        """How many layers a device has submitted in this iteration, and how many of them are answered."""
        return self._exchange.numbers(slot)

    def outlook(self) -> Outcome:
        """PEER_LOST or REFUSED where no answer will come in this iteration, else COMPLETED."""
        return self._exchange.outlook()

    def release_device(self) -> None:
        """Lets a device go on that waits in this iteration; what it computes from then on is for nothing."""
        self._exchange.release_device()

    def raise_for(self, outcome: Outcome, timeout_s: float) -> NoReturn:
        """What a wait raises that ended so."""
        if outcome is Outcome.PEER_LOST:
            raise PeerLostError("the CPU attention service is gone")
        if outcome is Outcome.TIMED_OUT:
            raise PlaneTimeoutError(f"no answer from the CPU within {timeout_s} s")
        _raise_if_failed(self._receive_report(_REFUSAL_TEXT_S))
        raise PlaneError(f"the CPU attention service refused iteration {self._iteration}")

    def finish(self, timeout_s: float) -> Report:
        """Ends an iteration that had work: what the CPU did in it."""
        work = self._receive_report(timeout_s)
        _raise_if_failed(work)
        return work.report

    def _receive_report(self, timeout_s: float) -> WorkReport:
        """This iteration's report; those of iterations that were given up are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_ms = max(0, int((deadline - time.monotonic()) * 1000))
            if self._socket.poll(min(remaining_ms, _PEER_CHECK_MS)):
                work = decode_report(self._socket.recv())
                if work.report.iteration == self._iteration:
                    return work
            elif not self.peer_alive():
                raise PeerLostError("the CPU attention service is gone")
            elif remaining_ms == 0:
                raise PlaneTimeoutError(f"no report from the CPU attention service within {timeout_s} s")

    def peer_alive(self) -> bool:
        """Whether the CPU attention service lives and holds this region."""
        return not self._region.is_closed and self._region.peer_alive()

    def close(self) -> None:
        """Gives the region up. Memory is unmapped with the last array."""
        self._region.close()
        self._socket.close()


def _raise_if_failed(work: WorkReport) -> None:
    if work.error is WorkError.INTERRUPTED:
        raise PeerLostError(f"the CPU attention service gave the region up: {work.text}")
    if work.error is not WorkError.NONE:
        raise PlaneError(f"iteration {work.report.iteration} was refused: {work.text}")


def _view(memory: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).reshape(shape)


def _slot_views(
    memory: npt.NDArray[np.uint8], offsets: tuple[int, int, int, int], shape: RegionShape
) -> tuple[Array, Array, Array, Array]:
    """q, k, v and out of one exchange slot."""
    dtype = numpy_dtype(shape.exchange_dtype)
    q_shape = (shape.max_sequences, shape.num_q_heads, shape.head_dim)
    kv_shape = (shape.max_sequences, shape.num_kv_heads, shape.head_dim)
    q, k, v, out = offsets
    return (
        _view(memory, q, dtype, q_shape),
        _view(memory, k, dtype, kv_shape),
        _view(memory, v, dtype, kv_shape),
        _view(memory, out, dtype, q_shape),
    )
