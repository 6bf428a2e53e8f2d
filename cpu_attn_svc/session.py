"""One open region and the thread that serves it: descriptors in, one call into C++ per iteration, reports out."""

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np
import zmq

from cpu_attn_svc import _attention
from cpu_attn_svc.totals import Totals
from svc_common.cpu_kernels import ThreadPool
from svc_common.tensor_plane import PlaneError, Report, Segment
from svc_common.tensor_plane.messages import (
    MAX_MESSAGE_BYTES,
    Descriptor,
    LayerBatch,
    WorkError,
    WorkReport,
    decode_descriptor,
    encode_report,
)

if TYPE_CHECKING:
    from cpu_attn_svc.layers import CpuLayers

# An idle session looks this often whether its executor lives and whether it is to stop.
_IDLE_CHECK_MS = 100
# A last report may take this long to leave.
_LINGER_MS = 200

logger = logging.getLogger(__name__)


class RegionSession:
    """Serves one executor until that ends, or until `close`. Its memory is freed when the session ends."""

    def __init__(
        self,
        segment: Segment,
        instruction_set: str,
        threads: ThreadPool,
        totals: Totals,
        layers: "CpuLayers | None" = None,
    ) -> None:
        """Listens at the segment's endpoint. `layers` are those that the region's shape asks for. Raises PlaneError.

        What is done is added to `totals`.
        """
        region = segment.region
        self.epoch = region.epoch
        self.num_blocks = region.num_blocks
        self.pool_bytes = region.pool_bytes
        self.blocks_used: int = 0
        """By the executor's last descriptor."""
        self.iterations: int = 0
        """Computed so far."""
        self.is_attached = False
        """Whether an executor has been seen to map the region."""
        self._totals = totals
        self._layers = layers
        self._max_tokens = segment.shape.max_tokens
        runner = layers.runner(segment, instruction_set, threads) if layers else None
        self._worker: _attention.Worker | None = _attention.Worker(region, instruction_set, threads, runner)
        self._stop = threading.Event()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._socket.bind(segment.endpoint)
            segment.admit_group()
        except zmq.ZMQError as error:
            self._socket.close()
            raise PlaneError(f"{segment.endpoint}: {error}") from error
        except PlaneError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, args=(segment, self._worker), name="region-session")

    def start(self) -> None:
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._worker is not None

    @property
    def computing_s(self) -> float:
        """For how long it has been computing in a single layer; 0 while it waits or is idle."""
        worker = self._worker
        return worker.computing_ns / 1e9 if worker else 0.0

    def wait(self, timeout_s: float) -> None:
        """Returns when the executor has ended or closed the region, or when time is up."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Gives up what runs and frees the region. Returns when the thread has ended."""
        self._stop.set()
        worker = self._worker
        if worker is not None:
            worker.cancel()
        self._thread.join()

    def _serve(self, segment: Segment, worker: _attention.Worker) -> None:
        self._totals.begin()
        try:
            has_names = True
            while not self._stop.is_set():
                self.is_attached = self.is_attached or segment.region.is_attached
                if self._socket.poll(_IDLE_CHECK_MS):
                    message = self._socket.recv()
                    if has_names:  # Not before: who has mapped the region may still be about to connect.
                        segment.unlink()
                        has_names = False
                    self._answer(segment, worker, message)
                elif segment.region.is_closed:
                    logger.info("the executor closed the region of epoch %d", self.epoch)
                    return
                elif self.is_attached and not segment.region.peer_alive():
                    logger.warning("the executor of epoch %d is gone", self.epoch)
                    return
        except PlaneError as error:
            logger.error("the region of epoch %d is given up: %s", self.epoch, error)
        finally:
            self._worker = None
            self._totals.end()
            self._socket.close()
            segment.close()

    def _answer(self, segment: Segment, worker: _attention.Worker, message: bytes) -> None:
        """Computes what the message describes. Raises PlaneError where it is no descriptor at all."""
        descriptor = decode_descriptor(message)
        if descriptor.epoch == self.epoch:
            self.blocks_used = descriptor.host_blocks_used
        if not descriptor.has_work:
            return
        work = self._compute(worker, descriptor)
        if work.error is WorkError.NONE:
            logger.debug("iteration %d: %s", descriptor.iteration, work.report)
        else:
            logger.warning("iteration %d was not computed: %s", descriptor.iteration, work.text)
            segment.region.refuse(descriptor.iteration)
        try:
            self._socket.send(encode_report(work), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("nobody takes the report of iteration %d", descriptor.iteration)

    def _compute(self, worker: _attention.Worker, descriptor: Descriptor) -> WorkReport:
        def failed(error: WorkError, text: str) -> WorkReport:
            return WorkReport(self.epoch, Report(descriptor.iteration, 0, 0), self.iterations, error, text)

        if descriptor.epoch != self.epoch:
            return failed(WorkError.STALE_EPOCH, f"epoch {descriptor.epoch}, this region's is {self.epoch}")
        sub_batches = [
            (submitted.batch.slot, submitted.first_submit, submitted.batch.context_tokens, submitted.batch.block_tables)
            for submitted in descriptor.sub_batches
        ]
        layers, passing = descriptor.layers, descriptor.layer_batches
        if passing and self._layers is None:
            return failed(WorkError.INVALID_DESCRIPTOR, "the region has no CPU layers")
        try:
            for batch in passing:
                _check_tokens(batch, self._max_tokens)
        except PlaneError as error:
            return failed(WorkError.INVALID_DESCRIPTOR, str(error))
        # What the addresses in `batches` point to lives as long as `rotations`.
        rotations = [self._layers.rotations(batch) for batch in passing] if self._layers else []
        batches = [
            (
                batch.first_row,
                batch.num_layers,
                batch.chunk_starts,
                batch.chunk_tokens,
                batch.context_tokens,
                batch.block_tables,
                [(rotation.cos_address, rotation.sin_address) for rotation in kinds],
            )
            for batch, kinds in zip(passing, rotations, strict=True)
        ]
        try:
            compute_ns, wait_ns, events = worker.run(
                sub_batches,
                layers.start,
                len(layers),
                descriptor.in_turn,
                descriptor.device_rings,
                descriptor.trace,
                descriptor.first_layer_batch,
                batches,
            )
        except PlaneError as error:
            return failed(WorkError.INVALID_DESCRIPTOR, str(error))
        except _attention.InterruptedIterationError as error:
            return failed(WorkError.INTERRUPTED, str(error))
        self.iterations += 1
        self._totals.add(compute_ns, wait_ns)
        report = Report(descriptor.iteration, compute_ns, wait_ns, tuple((e[0], e[1], e[2], e[3]) for e in events))
        return WorkReport(self.epoch, report, self.iterations)


def _check_tokens(batch: LayerBatch, max_tokens: int) -> None:
    """Before anything is made for each of them; the worker checks the rest. Raises PlaneError."""
    starts, tokens, contexts = batch.chunk_starts, batch.chunk_tokens, batch.context_tokens
    num_tokens = int(tokens.sum(dtype=np.int64)) + len(contexts)
    if np.any(tokens < 1) or np.any(starts < 0) or np.any(contexts < 1) or num_tokens > max_tokens:
        raise PlaneError(f"{num_tokens} tokens pass the CPU layers, of at most {max_tokens}, none before the first")
