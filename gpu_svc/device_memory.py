"""How many layers a device's memory holds beside all else that lies there, as arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_svc.weight_stream import NUM_BUFFERS


class DoesNotFitError(Exception):
    """More than the device's memory is asked for; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What is to share the memory of one device. Layers that do not lie there come through buffers that do."""

    memory_bytes: int
    """gpu.memory_bytes, or what the device has."""
    layer_bytes: tuple[int, ...]
    other_bytes: int
    """Embedding, head, norms."""
    kv_bytes: int
    num_stagings: int = 0
    """Buffers beside those that are computed with, where packed layers are unpacked."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    def weight_bytes(self, resident_layers: int) -> int:
        """Of the last so many layers and all that is in no layer."""
        return self.other_bytes + sum(self.layer_bytes[self.num_layers - resident_layers :])

    def buffer_bytes(self, streamed: Sequence[int]) -> int:
        """Of what these layers are streamed through."""
        if not streamed:
            return 0
        buffers = min(NUM_BUFFERS, len(streamed)) * max(self.layer_bytes[layer] for layer in streamed)
        return buffers + self.num_stagings * max(self.layer_bytes)

    def streamed_bytes(self, streamed: Sequence[int]) -> int:
        """That cross the link in each iteration.

        Those do not that lie in the buffers when an iteration ends, the last ones, and are the next one's first.
        """
        stay = set(streamed[:NUM_BUFFERS]) & set(streamed[-NUM_BUFFERS:])
        return sum(self.layer_bytes[layer] for layer in streamed if layer not in stay)

    def check(self, resident_layers: int, first_streamed: int = 0) -> None:
        """Raises DoesNotFitError."""
        streamed = range(first_streamed, self.num_layers - resident_layers)
        weights, buffers = self.weight_bytes(resident_layers), self.buffer_bytes(streamed)
        if weights + buffers + self.kv_bytes > self.memory_bytes:
            raise DoesNotFitError(
                f"{resident_layers} of {self.num_layers} layers with embedding and head take {weights} bytes, buffers "
                f"for the others {buffers}, gpu.kv_bytes is {self.kv_bytes}: more than the {self.memory_bytes} bytes "
                "of the device, see gpu.memory_bytes"
            )

    def most_resident(self, first_streamed: int = 0) -> int:
        """As many layers as fit of those from `first_streamed` on, all if all fit.

        Raises DoesNotFitError where not even streaming leaves room.
        """
        for resident in range(self.num_layers - first_streamed, 0, -1):
            try:
                self.check(resident, first_streamed)
            except DoesNotFitError:
                continue
            return resident
        self.check(0, first_streamed)
        return 0
