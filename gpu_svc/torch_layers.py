"""Layers of a TorchDecoder: packed bytes cross the link on a stream of their own, and are unpacked on the device.

On cuda all of that is only enqueued, and kernels that need a layer wait for it on the device (cuda/layer_copies.py). On
a CPU, where this is tested, a copy has been made when its call returns.
"""

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_svc.link import Link
from gpu_svc.unpacking import LayerViews
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.layer_file import LayerFile
from svc_common.decoder.torch_decoder import TorchDecoder

if TYPE_CHECKING:
    from gpu_svc.cuda.layer_copies import LayerCopies


class TorchLayers:
    """`DeviceLayers`."""

    def __init__(
        self, decoder: TorchDecoder, packed: CpuDecoder, open_file: Callable[[], LayerFile], link: Link
    ) -> None:
        """`decoder` has its vocabulary, and may have all its layers; `packed` says how the file has them."""
        self.decoder = decoder
        self.layer_bytes = packed.layer_bytes
        self._device = decoder.device
        self._packed = packed
        self._open_file = open_file
        self._link = link
        self._staging: Tensor | None = None  # one packed layer, on the device
        self._buffers: list[Tensor] = []
        self._views: dict[tuple[int, int], LayerViews] = {}  # by layer and buffer
        self._copies: LayerCopies | None = None  # on cuda, with the file

    @cached_property
    def _file(self) -> LayerFile:
        file = self._open_file()
        if self._device.type == "cuda":
            from gpu_svc.cuda.layer_copies import LayerCopies

            self._copies = LayerCopies(self._device, file.path, file.address, file.num_bytes)
        return file

    @property
    def wait_ns(self) -> int:
        return self._copies.wait_ns if self._copies else 0

    @property
    def arrived(self) -> Callable[[int], int] | None:
        return self._copies.arrived if self._copies else None

    def open(self) -> None:
        _ = self._file

    def is_resident(self, layer: int) -> bool:
        return self.decoder.is_bound(layer)

    def load(self, layer: int) -> None:
        self.open()
        views = self._make_views(layer, self._memory(self.layer_bytes[layer]))
        if self._copies is not None:
            self._copies.follow_main()
        self._carry(layer, views)
        if self._copies is not None:
            self._copies.settle()
        self.decoder.bind_layer(layer, views.weights)

    def drop(self, layer: int) -> None:
        self.decoder.bind_layer(layer, None)

    def make_buffers(self, num: int, num_bytes: int) -> None:
        self._views.clear()
        self._buffers = [self._memory(num_bytes) for _ in range(num)]
        if self._copies is not None:
            self._copies.make_buffers(num)
        if not num:
            self._staging = None

    def copy(self, layer: int, buffer: int) -> int:
        views = self._views.get((layer, buffer)) or self._make_views(layer, self._buffers[buffer])
        self._views[layer, buffer] = views
        if self._copies is None:
            return self._carry(layer, views)
        self._copies.begin(buffer)
        num_bytes = self._carry(layer, views)
        self._copies.copied(buffer)
        return num_bytes

    def await_copy(self, buffer: int) -> None:
        if self._copies is not None:
            self._copies.await_copy(buffer)

    def bind(self, layer: int, buffer: int) -> None:
        self.decoder.bind_layer(layer, self._views[layer, buffer].weights)

    def release(self, buffer: int) -> None:
        if self._copies is not None:
            self._copies.release(buffer)

    def bind_for_measuring(self, layer: int) -> None:
        """Into a buffer's memory, whatever lies there: the numbers do not matter, only how many there are."""
        memory = self._buffers[layer % len(self._buffers)]
        self.decoder.bind_layer(layer, self._make_views(layer, memory).weights)

    def _memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def _make_views(self, layer: int, memory: Tensor) -> LayerViews:
        parts, spec = self._packed.layer_parts(layer), self.decoder.spec.layer(layer)
        return LayerViews(parts, spec, memory, self.decoder.dtype, self._packed.panel_columns)

    def _carry(self, layer: int, views: LayerViews) -> int:
        """Its bytes; on cuda the copy is only enqueued."""
        source = _as_tensor(self._file, layer)
        with torch.inference_mode():
            if self._copies is None:
                staged = self._staged(len(source))
                self._link.to_device.carry(len(source), lambda piece: staged[piece].copy_(source[piece]))
                views.unpack(staged)
            else:
                with self._copies.stream():
                    staged = self._staged(len(source))
                    self._copies.cross(source, staged)
                    views.unpack(staged)
        return len(source)

    def _staged(self, num_bytes: int) -> Tensor:
        """[num_bytes] of what one packed layer lies in on the device."""
        if self._staging is None:
            self._staging = self._memory(max(self.layer_bytes))
        return self._staging[:num_bytes]


def _as_tensor(file: LayerFile, layer: int) -> Tensor:
    """A view, valid as long as the file is; torch warns of memory that is only read, and is told nothing of it."""
    memory = file.layer(layer)
    view = (ctypes.c_uint8 * len(memory)).from_address(memory.ctypes.data)
    return torch.frombuffer(view, dtype=torch.uint8)
