"""Brings layers to the device one after another while it computes, through two buffers; holds no weights itself.

When a layer is ready its copy has been made, or it is enqueued in the device's own order: who needs it waits there.

An iteration says in which order it needs them. A layer is in use from its first pre_attention until as many of its
post_attentions have run; then its buffer takes the next that is needed. With two sub-batches, one of which is a layer
ahead, two buffers are in use at times, never three (pipeline.py). After an iteration's last layer the first ones of the
next come, which are most likely those of this one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NUM_BUFFERS = 2


@dataclass(slots=True)
class _Buffer:
    index: int
    layer: int = -1
    """-1: none."""
    ready: bool = True
    """Whether its layer has come."""
    promised: int = 0
    """Times that the layer is still to be taken in use."""
    in_use: int = 0

    @property
    def is_free(self) -> bool:
        return self.ready and not self.promised and not self.in_use


@dataclass(frozen=True, slots=True)
class Copied:
    """A layer that came; times of CLOCK_MONOTONIC."""

    layer: int
    start_ns: int
    end_ns: int


class WeightStream:
    """One thread that copies. All methods belong to the executor's."""

    def __init__(
        self, num_buffers: int, copy: Callable[[int, int], int], arrived: Callable[[int], int] | None = None
    ) -> None:
        """`copy(layer, buffer)` returns the bytes once they are there, or, with `arrived`, once they are on their way:
        `arrived(buffer)` then returns when they are there, the nanoseconds that they took.
        """
        self.num_bytes = 0
        self.wait_ns = 0
        """Of the executor's thread."""
        self.copied: deque[Copied] = deque(maxlen=4096)
        """The latest."""
        self._copy = copy
        self._arrived = arrived
        self._buffers = [_Buffer(index) for index in range(num_buffers)]
        self._needed: deque[int] = deque()
        self._first: list[int] = []  # of the latest iteration
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def begin(self, layers: Iterable[int]) -> None:
        """Those of one iteration that have to come, in the order in which they are needed. Nothing is in use."""
        with self._changed:
            self._needed = deque(layers)
            self._first = list(dict.fromkeys(self._needed))[: len(self._buffers)]
            for buffer in self._buffers:
                buffer.promised = buffer.in_use = 0
            self._changed.notify_all()

    def acquire(self, layer: int) -> int:
        """Waits for the layer and takes it in use; the buffer that holds it. Raises what its copy has raised."""
        start_ns = time.perf_counter_ns()
        with self._changed:
            while (buffer := self._holding(layer)) is None or not buffer.ready:
                if self._failure is not None:
                    raise self._failure
                if buffer is None and (not self._needed or self._needed[0] != layer):
                    self._expect(layer)
                self._changed.wait()
            if buffer.promised:
                buffer.promised -= 1
            elif self._needed and self._needed[0] == layer:  # It was there before the thread saw that it is needed.
                self._needed.popleft()
            buffer.in_use += 1
        self.wait_ns += time.perf_counter_ns() - start_ns
        return buffer.index

    def release(self, layer: int) -> None:
        """Of what was acquired."""
        with self._changed:
            buffer = self._holding(layer)
            assert buffer is not None
            buffer.in_use -= 1
            if buffer.is_free:
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, after a copy that runs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _holding(self, layer: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer == layer), None)

    def _expect(self, layer: int) -> None:
        """What was said of the order does not hold: this layer next, and nothing is known of others."""
        if all(buffer.in_use for buffer in self._buffers):
            raise RuntimeError(f"layer {layer} is needed while {len(self._buffers)} others are in use")
        for buffer in self._buffers:
            buffer.promised = 0
        self._needed = deque([layer])
        self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            buffer, layer = job
            start_ns = time.perf_counter_ns()
            try:
                num_bytes = self._copy(layer, buffer.index)
                with self._changed:
                    self.num_bytes += num_bytes
                    if self._arrived is None:
                        self.copied.append(Copied(layer, start_ns, time.perf_counter_ns()))
                    buffer.ready = True
                    self._changed.notify_all()
                if self._arrived is not None:
                    took_ns = self._arrived(buffer.index)
                    end_ns = time.perf_counter_ns()
                    self.copied.append(Copied(layer, end_ns - took_ns, end_ns))
            except BaseException as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return

    def _next_job(self) -> tuple[_Buffer, int] | None:
        """Waits until a layer is to be copied into a buffer; None at the end."""
        with self._changed:
            while not self._closed:
                if (job := self._needed_job() or self._likely_job()) is not None:
                    job[0].layer, job[0].ready = job[1], False
                    return job
                self._changed.wait()
            return None

    def _needed_job(self) -> tuple[_Buffer, int] | None:
        while self._needed:
            layer = self._needed[0]
            buffer = self._holding(layer)
            if buffer is None:
                buffer = next((one for one in self._buffers if one.is_free), None)
                if buffer is None:
                    return None
            self._needed.popleft()
            buffer.promised += 1
            if buffer.layer != layer:
                return buffer, layer
        return None

    def _likely_job(self) -> tuple[_Buffer, int] | None:
        """The first layers of the next iteration, when all of this one have come."""
        if self._needed:
            return None
        for layer in self._first:
            if self._holding(layer) is None:
                spare = (one for one in self._buffers if one.is_free and one.layer not in self._first)
                return next(((buffer, layer) for buffer in spare), None)
        return None
