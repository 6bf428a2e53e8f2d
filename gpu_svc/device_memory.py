"""How one device's memory is divided among weights, graphs, activations and KV, as arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_svc.weight_stream import NUM_BUFFERS
from svc_common.memory import size_text


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
    activation_bytes: int = 0
    """Of the largest batch, its logits and the drawing of its tokens."""
    graph_bytes: int = 0
    """Of captured graphs."""
    spare_bytes: int = 0
    """That nobody is promised: an allocator's gaps, and what else uses the device."""

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

    def free_bytes(self, resident_layers: int, first_streamed: int = 0) -> int:
        """What all that is promised leaves; less than 0 where it does not fit."""
        streamed = range(first_streamed, self.num_layers - resident_layers)
        weights = self.weight_bytes(resident_layers) + self.buffer_bytes(streamed)
        others = self.graph_bytes + self.activation_bytes + self.kv_bytes + self.spare_bytes
        return self.memory_bytes - weights - others

    def check(self, resident_layers: int, first_streamed: int = 0) -> None:
        """Raises DoesNotFitError, whose text has each part in bytes."""
        if self.free_bytes(resident_layers, first_streamed) >= 0:
            return
        streamed = range(first_streamed, self.num_layers - resident_layers)
        raise DoesNotFitError(
            f"{resident_layers} of {self.num_layers} layers with embedding and head take "
            f"{self.weight_bytes(resident_layers)} bytes, buffers for the others {self.buffer_bytes(streamed)}, "
            f"graphs {self.graph_bytes}, activations of the largest batch {self.activation_bytes}, KV {self.kv_bytes}, "
            f"{self.spare_bytes} are kept free: more than the {self.memory_bytes} bytes of the device; see "
            "gpu.memory_bytes, gpu.kv_bytes, planner.max_batch_tokens and planner.max_running_sequences"
        )

    def most_resident(self, first_streamed: int = 0) -> int:
        """As many layers as fit of those from `first_streamed` on, all if all fit.

        Raises DoesNotFitError where not even streaming leaves room.
        """
        for resident in range(self.num_layers - first_streamed, 0, -1):
            if self.free_bytes(resident, first_streamed) >= 0:
                return resident
        self.check(0, first_streamed)
        return 0

    def filled(self, least_kv_bytes: int) -> "DeviceMemory":
        """With KV in all that is left: beside all layers where that is at least `least_kv_bytes`, else beside as many
        as leave so much. Raises DoesNotFitError where not even streaming does.
        """
        least = replace(self, kv_bytes=least_kv_bytes)
        return replace(self, kv_bytes=least_kv_bytes + least.free_bytes(least.most_resident()))

    def text(self) -> str:
        """For the log: each part, with as many layers on the device as fit."""
        resident = self.most_resident()
        parts = (
            ("weights", self.weight_bytes(resident)),
            ("buffers for streamed weights", self.buffer_bytes(range(self.num_layers - resident))),
            ("graphs", self.graph_bytes),
            ("activations", self.activation_bytes),
            ("KV", self.kv_bytes),
            ("free", self.free_bytes(resident) + self.spare_bytes),
        )
        divided = " | ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in parts)
        return f"device memory {size_text(self.memory_bytes)}: {divided}"
