"""Plays a device's streams on the CPU: the same words and memory, the same order, and copies as late as they may be."""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu_svc.cuda.device_side import DeviceSide
from gpu_svc.cuda.doorbells import StreamDoorbells
from gpu_svc.region_tensors import pool_of
from svc_common.tensor_plane import TensorPlane


class ImmediateOperations:
    """`StreamOperations` that are done when a call returns, by a device that looks at words as seldom as it likes."""

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """`on_wait` is called before each look at a word."""
        self.sent: list[tuple[int, int]] = []
        """(slot, value)"""
        self._waited_ns = 0
        self._on_wait = on_wait

    def begin(self) -> None:
        """Words are all that it has."""

    def send(self, slot: int, copies: Sequence[tuple[Tensor, Tensor]], word: int, value: int) -> None:
        for target, source in copies:
            target.copy_(source)
        ctypes.c_uint32.from_address(word).value = value
        self.sent.append((slot, value))

    def fetch(self, slot: int, word: int, value: int, target: Tensor, source: Tensor) -> None:
        start_ns = time.perf_counter_ns()
        at = ctypes.c_uint32.from_address(word)
        self._on_wait()
        while ctypes.c_int32(at.value - value).value < 0:
            time.sleep(20e-6)
            self._on_wait()
        target.copy_(source)
        self._waited_ns += time.perf_counter_ns() - start_ns

    def finish(self) -> int:
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns

    def close(self) -> None:
        """Nothing runs."""


class LateQueue:
    """`CopyQueue` that does nothing before somebody has to wait for it."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._num_done = 0

    def follow_main(self) -> None:
        """The main stream is where its thread is."""

    def follow(self, arrival: "LateArrival") -> None:
        self._work.append(arrival.wait)

    def run(self, copy: Callable[[], object]) -> None:
        self._work.append(copy)

    def mark(self) -> "LateArrival":
        return LateArrival(self, self._num_done + len(self._work))

    def advance(self, to: int) -> None:
        while self._num_done < to:
            self._work.popleft()()
            self._num_done += 1


class LateArrival:
    def __init__(self, queue: LateQueue, place: int) -> None:
        self._queue = queue
        self._place = place

    def wait(self) -> None:
        self._queue.advance(self._place)


class Sides:
    """Makes them in place of cpu_attention_client's, for device cpu."""

    def __init__(self, answer_timeout_s: float = 5.0) -> None:
        self.on_wait: Callable[[], None] = lambda: None
        self.operations: list[ImmediateOperations] = []
        self.num_unpinned = 0
        self._answer_timeout_s = answer_timeout_s

    def make(self, plane: TensorPlane, device: torch.device) -> DeviceSide:
        self.operations.append(ImmediateOperations(lambda: self.on_wait()))
        address = plane.memory.ctypes.data
        doorbells = StreamDoorbells(plane, self.operations[-1], address, self._answer_timeout_s)
        return DeviceSide(doorbells, pool_of(plane), LateQueue, self._unpin)

    def _unpin(self) -> None:
        self.num_unpinned += 1
