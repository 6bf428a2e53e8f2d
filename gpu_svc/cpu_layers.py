"""Layers on device "cpu": private memory stands for the device's, the layer file is what lies beyond the link."""

from collections.abc import Callable
from functools import cached_property

from gpu_svc.link import Link
from svc_common.cpu_kernels import weight_memory
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.layer_file import LayerFile
from svc_common.decoder.packing import Bytes


class CpuLayers:
    """`DeviceLayers` of a CpuDecoder."""

    wait_ns = 0
    arrived = None

    def __init__(self, decoder: CpuDecoder, open_file: Callable[[], LayerFile], link: Link) -> None:
        """`decoder` has its vocabulary, and may have all its layers; the file is opened when it is first needed."""
        self.decoder = decoder
        self.layer_bytes = decoder.layer_bytes
        self._open_file = open_file
        self._link = link
        self._buffers: list[Bytes] = []

    @cached_property
    def _file(self) -> LayerFile:
        return self._open_file()

    def open(self) -> None:
        _ = self._file

    def is_resident(self, layer: int) -> bool:
        return self.decoder.is_bound(layer)

    def load(self, layer: int) -> None:
        memory = weight_memory(self.layer_bytes[layer])
        self._carry(layer, memory)
        self.decoder.bind_layer(layer, memory)

    def drop(self, layer: int) -> None:
        self.decoder.bind_layer(layer, None)

    def make_buffers(self, num: int, num_bytes: int) -> None:
        self._buffers = [weight_memory(num_bytes) for _ in range(num)]

    def copy(self, layer: int, buffer: int) -> int:
        return self._carry(layer, self._buffers[buffer])

    def bind(self, layer: int, buffer: int) -> None:
        self.decoder.bind_layer(layer, self._buffers[buffer])

    def await_copy(self, buffer: int) -> None:
        """It has been made."""

    def release(self, buffer: int) -> None:
        """What is computed here is done when its call returns."""

    def bind_for_measuring(self, layer: int) -> None:
        self.decoder.bind_layer(layer, self._file.layer(layer))

    def _carry(self, layer: int, memory: Bytes) -> int:
        source = self._file.layer(layer)
        target = memory[: len(source)]

        def copy(piece: slice) -> None:
            target[piece] = source[piece]

        self._link.to_device.carry(len(source), copy)
        return len(source)
