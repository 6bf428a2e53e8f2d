"""Layers on their way to a device: copies on one stream, and events that say who waits for whom.

copy stream   layer 4 into buffer 0 │ 5 into buffer 1 │ 6 into buffer 0, once it is free
main stream                         │ 4 computed      │ 5 ...
"""

import logging
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from gpu_svc.cuda.events import Wait, is_done, make_event, make_wait, nanoseconds
from gpu_svc.cuda.pinned import pin, staging
from gpu_svc.cuda.streams import make_stream
from svc_common.memory import available_bytes

_STAGING_BYTES = 16 * 2**20

logger = logging.getLogger(__name__)


class LayerCopies:
    """`copy`, `load` and `arrived` belong to the thread that copies, the others to the executor's; none but `arrived`
    and `load` wait on the host, unless the source can't be pinned.
    """

    def __init__(self, device: torch.device, path: Path, address: int, num_bytes: int) -> None:
        """From a file at `path` that is mapped at `address`, to be read only."""
        self._device = device
        self._stream = make_stream(device)
        self._begun: list[torch.cuda.Event] = []
        self._ready: list[torch.cuda.Event] = []
        self._free: list[torch.cuda.Event | None] = []
        self._waits: deque[Wait] = deque()
        self._waited_ns = 0
        pinned = _fits_memory(path, num_bytes) and pin(address, num_bytes, device, str(path), read_only=True)
        self._stagings = [] if pinned else [_Staging(device), _Staging(device)]
        self._num_staged = 0

    def make_buffers(self, num: int) -> None:
        """That the main stream has been told to make; nothing is on its way."""
        self._begun = [make_event(timing=True) for _ in range(num)]
        self._ready = [make_event(timing=True, sleeps=True) for _ in range(num)]
        self._free = [None] * num
        self.follow_main()

    def follow_main(self) -> None:
        """Copies from now on come after what the main stream was told so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def stream(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._stream)

    def begin(self, buffer: int) -> None:
        """A copy into a buffer begins, once the device has computed with what the buffer holds."""
        if (computed := self._free[buffer]) is not None:
            self._stream.wait_event(computed)
        self._begun[buffer].record(self._stream)

    def cross(self, source: Tensor, target: Tensor) -> None:
        """Bytes [n] of the file into bytes of the device; within `stream`."""
        if not self._stagings:
            target.copy_(source, non_blocking=True)
            return
        for start in range(0, len(source), _STAGING_BYTES):
            part = slice(start, min(start + _STAGING_BYTES, len(source)))
            staging = self._stagings[self._num_staged % len(self._stagings)]
            self._num_staged += 1
            staging.cross(source[part], target[part], self._stream)

    def copied(self, buffer: int) -> None:
        """All of a layer is enqueued."""
        self._ready[buffer].record(self._stream)

    def arrived(self, buffer: int) -> int:
        """Returns once that is there: nanoseconds that it took."""
        self._ready[buffer].synchronize()
        return nanoseconds(self._begun[buffer], self._ready[buffer])

    def settle(self) -> None:
        """Returns once all is there."""
        self._stream.synchronize()

    def await_copy(self, buffer: int) -> None:
        """Has the main stream wait for the last copy into a buffer."""
        before, after = make_wait()
        before.record()
        self._ready[buffer].wait()
        after.record()
        self._waits.append((before, after))

    def release(self, buffer: int) -> None:
        """What the main stream was told to compute with a buffer so far comes before the next copy into it."""
        self._free[buffer] = torch.cuda.current_stream(self._device).record_event()

    @property
    def wait_ns(self) -> int:
        """That the main stream has waited, as far as it has got."""
        while self._waits and is_done(self._waits[0][1]):
            self._waited_ns += nanoseconds(*self._waits.popleft())
        return self._waited_ns


def _fits_memory(path: Path, num_bytes: int) -> bool:
    """Pinned pages are all in memory at once and never leave it, where a mapped file's come and go."""
    available = available_bytes()
    if num_bytes <= available:
        return True
    logger.warning("%s, %d bytes, is not pinned: %d bytes of memory are left", path, num_bytes, available)
    return False


class _Staging:
    """Pinned memory that pageable bytes go through."""

    def __init__(self, device: torch.device) -> None:
        self._memory = staging(_STAGING_BYTES, device)
        self._crossed = make_event(sleeps=True)

    def cross(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> None:
        self._crossed.synchronize()  # What it held before.
        part = self._memory[: len(source)]
        part.copy_(source)
        target.copy_(part, non_blocking=True)
        self._crossed.record(stream)
