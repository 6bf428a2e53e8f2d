"""A decoder some of whose layers lie on the device, while the others are brought there in each iteration."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gpu_svc.device_memory import DeviceMemory
from gpu_svc.weight_stream import NUM_BUFFERS, Copied, WeightStream
from svc_common.decoder.decoder import Decoder, WeightTraffic
from svc_common.progress import Progress

logger = logging.getLogger(__name__)


class DeviceLayers(Protocol):
    """A decoder's layers, each on the device or not; `copy` belongs to the thread of a WeightStream."""

    layer_bytes: tuple[int, ...]

    @property
    def wait_ns(self) -> int:
        """That the device has waited for copies so far, as far as it is known."""
        ...

    @property
    def decoder(self) -> Decoder: ...

    def open(self) -> None:
        """Makes sure that layers can be had. Raises LayerFileError and CheckpointError."""
        ...

    def is_resident(self, layer: int) -> bool:
        """Whether the decoder can compute it."""
        ...

    def load(self, layer: int) -> None:
        """Makes it resident."""
        ...

    def drop(self, layer: int) -> None:
        """Gives its memory up."""
        ...

    def make_buffers(self, num: int, num_bytes: int) -> None:
        """In the place of those there were."""
        ...

    def copy(self, layer: int, buffer: int) -> int:
        """Brings a layer into a buffer: the bytes, once they are there or, on a device that copies beside its kernels,
        once they are on their way.
        """
        ...

    @property
    def arrived(self) -> Callable[[int], int] | None:
        """Returns once the last copy into a buffer is there, the nanoseconds that it took; None where `copy` does."""
        ...

    def await_copy(self, buffer: int) -> None:
        """What is computed from now on finds the last copy there."""
        ...

    def bind(self, layer: int, buffer: int) -> None:
        """Has the decoder compute the layer from the buffer."""
        ...

    def release(self, buffer: int) -> None:
        """What was computed with the buffer so far has to end before the next copy into it."""
        ...

    def bind_for_measuring(self, layer: int) -> None:
        """Has the decoder compute the layer from wherever it need not wait for."""
        ...


class PlacedDecoder:
    """A `Decoder`. `place` says which layers lie where; until then nothing is streamed."""

    def __init__(self, layers: DeviceLayers, memory: DeviceMemory) -> None:
        self.memory = memory
        self._inner = layers.decoder
        self._layers = layers
        self._stream: WeightStream | None = None
        self._streamed = range(0)
        self._num_resident = -1
        self._buffer_of: dict[int, int] = {}  # what each streamed layer is bound to
        self._before = WeightTraffic()  # of streams that have ended
        self._awaits = True
        self.spec = self._inner.spec
        self.device: torch.device = self._inner.device
        self.dtype = self._inner.dtype
        self.weight_dtype = self._inner.weight_dtype
        self.embed = self._inner.embed
        self.workspace = self._inner.workspace
        self.pre_attention = self._inner.pre_attention
        self.logits = self._inner.logits

    def place(self, streamed: range, num_resident: int) -> None:
        """The last `num_resident` layers lie on the device, `streamed` come in each iteration, others nowhere.

        Memory is given up before more is taken. Raises LayerFileError and CheckpointError, and then all is as it was.
        """
        num_layers = self.spec.num_layers
        resident = range(num_layers - num_resident, num_layers)
        assert not set(streamed) & set(resident)
        if (streamed, num_resident) == (self._streamed, self._num_resident):
            return
        if streamed or not all(map(self._layers.is_resident, resident)):
            self._layers.open()
        self.close()
        for layer in range(num_layers):
            if layer not in resident:
                self._layers.drop(layer)
        progress = Progress(logger, "bringing layers to the device", num_layers)
        for layer in resident:
            if not self._layers.is_resident(layer):
                self._layers.load(layer)
                progress.reached(layer + 1)
        self._streamed, self._num_resident = streamed, num_resident
        if streamed:
            num_buffers = min(NUM_BUFFERS, len(streamed))
            self._layers.make_buffers(num_buffers, max(self._layers.layer_bytes[layer] for layer in streamed))
            self._stream = WeightStream(num_buffers, self._layers.copy, self._layers.arrived)
        else:
            self._layers.make_buffers(0, 0)  # What loading needed beside the layers.

    def close(self) -> None:
        """Ends the streaming; buffers are given up."""
        if self._stream is not None:
            self._stream.close()
            self._before = self._host_traffic
            self._stream = None
        for layer in self._buffer_of:
            self._layers.drop(layer)
        self._buffer_of = {}
        self._streamed, self._num_resident = range(0), -1
        self._layers.make_buffers(0, 0)

    @property
    def weight_bytes(self) -> int:
        return self._inner.weight_bytes

    @property
    def traffic(self) -> WeightTraffic:
        traffic = self._host_traffic
        return WeightTraffic(traffic.num_bytes, traffic.wait_ns + self._layers.wait_ns)

    @property
    def _host_traffic(self) -> WeightTraffic:
        """With the waits of the executor's thread only."""
        if self._stream is None:
            return self._before
        return WeightTraffic(
            self._before.num_bytes + self._stream.num_bytes, self._before.wait_ns + self._stream.wait_ns
        )

    def copied_since(self, start_ns: int) -> list[Copied]:
        """Layers that came after that time of CLOCK_MONOTONIC, in order."""
        return [one for one in list(self._stream.copied) if one.end_ns > start_ns] if self._stream else []

    def begin(self, layers: Iterable[int]) -> None:
        if self._stream is not None:
            self._stream.begin([layer for layer in layers if layer in self._streamed])

    def await_layer(self, layer: int) -> bool:
        if self._stream is None or not self._awaits or layer not in self._streamed:
            return False
        buffer = self._stream.acquire(layer)
        if self._buffer_of.get(layer) != buffer:
            self._layers.bind(layer, buffer)
            self._buffer_of[layer] = buffer
        self._layers.await_copy(buffer)
        return True

    def post_attention(self, layer: int, attention: Tensor, hidden: Tensor) -> Tensor:
        hidden = self._inner.post_attention(layer, attention, hidden)
        if self._stream is not None and self._awaits and layer in self._streamed:
            self._layers.release(self._buffer_of[layer])
            self._stream.release(layer)
        return hidden

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self._awaits = False
        for layer in self._streamed:
            self._layers.bind_for_measuring(layer)
        try:
            yield
        finally:
            for layer in self._streamed:
                self._layers.drop(layer)
            self._buffer_of = {}
            self._awaits = True
