"""Layers of a TorchDecoder: packed bytes cross the link on a stream of their own, and are unpacked on the device.

On cuda the copies of one layer run beside the kernels of another; on a CPU, where this is tested, one after the other.
"""

import ctypes
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpu_svc.link import Link
from gpu_svc.unpacking import LayerViews
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.layer_file import LayerFile
from svc_common.decoder.torch_decoder import TorchDecoder

_CUDA_HOST_REGISTER_READ_ONLY = 8

logger = logging.getLogger(__name__)


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
        self._free: list[torch.cuda.Event | None] = []  # by buffer: when the device has computed with it
        on_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]

    @cached_property
    def _file(self) -> LayerFile:
        file = self._open_file()
        if self._device.type == "cuda":
            _register(file)
        return file

    def open(self) -> None:
        _ = self._file

    def is_resident(self, layer: int) -> bool:
        return self.decoder.is_bound(layer)

    def load(self, layer: int) -> None:
        views = self._make_views(layer, self._memory(self.layer_bytes[layer]))
        self._carry(layer, views)
        self.decoder.bind_layer(layer, views.weights)

    def drop(self, layer: int) -> None:
        self.decoder.bind_layer(layer, None)

    def make_buffers(self, num: int, num_bytes: int) -> None:
        self._views.clear()
        self._buffers = [self._memory(num_bytes) for _ in range(num)]
        self._free = [None] * num
        if not num:
            self._staging = None

    def copy(self, layer: int, buffer: int) -> int:
        if (computed := self._free[buffer]) is not None:
            computed.synchronize()
        views = self._views.get((layer, buffer)) or self._make_views(layer, self._buffers[buffer])
        self._views[layer, buffer] = views
        return self._carry(layer, views)

    def bind(self, layer: int, buffer: int) -> None:
        self.decoder.bind_layer(layer, self._views[layer, buffer].weights)

    def release(self, buffer: int) -> None:
        if self._stream is not None:
            self._free[buffer] = torch.cuda.current_stream(self._device).record_event()

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
        """Returns when it is there, so that who waits for it waits on the host."""
        source = _as_tensor(self._file, layer)
        if self._staging is None:
            self._staging = self._memory(max(self.layer_bytes))
        staged = self._staging[: len(source)]
        with self._on_stream(), torch.inference_mode():
            self._link.to_device.carry(len(source), lambda piece: staged[piece].copy_(source[piece], non_blocking=True))
            views.unpack(staged)
            if self._stream is not None:
                self._stream.synchronize()
        return len(source)

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def _as_tensor(file: LayerFile, layer: int) -> Tensor:
    """A view, valid as long as the file is; torch warns of memory that is only read, and is told nothing of it."""
    memory = file.layer(layer)
    view = (ctypes.c_uint8 * len(memory)).from_address(memory.ctypes.data)
    return torch.frombuffer(view, dtype=torch.uint8)


def _register(file: LayerFile) -> None:
    """So that the device reads the file itself; where it may not, the driver copies by way of memory of its own."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(file.address, file.num_bytes, _CUDA_HOST_REGISTER_READ_ONLY))
    if code:
        logger.warning("%s cannot be pinned, error %d: copies to the device will be slower", file.path, code)
