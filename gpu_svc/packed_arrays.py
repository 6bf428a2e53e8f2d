"""Arrays that cross to the device together: one copy in the place of many, each of which is a launch and a wait."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# As kernels like their arguments best.
_ALIGNMENT = 16

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


class PackedArrays:
    """Where arrays of given types and shapes lie in one buffer of bytes, one after another."""

    def __init__(self, *fields: tuple[type[np.generic], tuple[int, ...]]) -> None:
        self._fields = [(np.dtype(dtype), shape) for dtype, shape in fields]
        self._torch_types = [torch.from_numpy(np.empty(0, dtype)).dtype for dtype, _ in fields]
        sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in self._fields]
        starts = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        *first, self.num_bytes = starts
        self._places = [slice(start, start + size) for start, size in zip(first, sizes, strict=True)]

    def in_host(self, buffer: Bytes) -> list[Array]:
        """Views of a buffer of `num_bytes` or more."""
        return [
            buffer[place].view(dtype).reshape(shape)
            for place, (dtype, shape) in zip(self._places, self._fields, strict=True)
        ]

    def on_device(self, buffer: Tensor) -> list[Tensor]:
        """The same of a tensor of uint8."""
        return [
            buffer[place].view(dtype).view(shape)
            for place, dtype, (_, shape) in zip(self._places, self._torch_types, self._fields, strict=True)
        ]


def staging(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 in host memory. Of a GPU it is pinned, and torch keeps it until copies that were launched from it end."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """On the CPU views, elsewhere copies that come in one piece, for which nobody waits."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    layout = PackedArrays(*((array.dtype.type, array.shape) for array in arrays))
    staged = staging(layout.num_bytes, device)
    for place, array in zip(layout.in_host(staged.numpy()), arrays, strict=True):
        place[...] = array
    return layout.on_device(staged.to(device, non_blocking=True))


def upload(array: Array, device: torch.device) -> Tensor:
    """A single one."""
    (there,) = to_device([array], device)
    return there
