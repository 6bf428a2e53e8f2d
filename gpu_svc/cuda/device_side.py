"""What a device has of a region that it reads and writes by itself: pinned memory, doorbells, blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from gpu_svc.cuda.doorbells import StreamDoorbells
from gpu_svc.cuda.swaps import CopyQueue
from gpu_svc.kv_layout import KvBlocks


@dataclass(frozen=True, slots=True)
class DeviceSide:
    """Of one region. What is None the executor's thread does instead."""

    doorbells: StreamDoorbells | None
    blocks: KvBlocks | None
    """The host pool, as tensors of the device."""
    make_queue: Callable[[], CopyQueue]
    """For copies to or from `blocks`."""
    unpin: Callable[[], None]

    def close(self) -> None:
        """Before the region is unmapped; returns once the device uses it no more."""
        if self.doorbells is not None:
            self.doorbells.close()
        self.unpin()
