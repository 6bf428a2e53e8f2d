"""What the pipeline asks of an attention backend: prepare once per iteration, run once per layer.

Layers may differ in their sliding window, so each call names its layer. Shapes: q and out are [n, num_q_heads,
head_dim] in the compute type; `layer_blocks` is one layer of the device's KV cache, [num_blocks, 2, num_kv_heads,
block_tokens * head_dim] in the KV type. `out` is written; nothing else is.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.kv_layout import KvBlocks
from svc_common.model.spec import ModelSpec

Work = TypeVar("Work")


class LayerWindows:
    """The sliding windows of a model's layers, of which there are one or two kinds."""

    def __init__(self, spec: ModelSpec) -> None:
        by_layer = [layer.sliding_window for layer in spec.layers]
        self.distinct = tuple(dict.fromkeys(by_layer))
        """Tokens each query sees, itself included; 0: all."""
        self._kinds = [self.distinct.index(window) for window in by_layer]

    def by_layer(self, make: Callable[[int], Work]) -> list[Work]:
        """What `make` makes for a window, once for each kind, layer by layer."""
        made = [make(window) for window in self.distinct]
        return [made[kind] for kind in self._kinds]


class DecodeAttention(Protocol):
    """One token for each of n sequences, over KV that lies in blocks and includes that token."""

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None: ...


class DecodeOnDevice(Protocol):
    """`AttentionBackend.decode` over lengths and tables that lie on the device, and may be others at each run."""

    def __call__(self, context_tokens: Tensor, block_tables: Tensor, longest: int) -> DecodeAttention:
        """context_tokens [n], `longest` at most, and block_tables [n, stride], both int32."""
        ...


class PrefillAttention(Protocol):
    """One chunk of one prompt, causal."""

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        """All tokens up to the chunk's end lie in blocks of the device's cache."""
        ...

    def run_on_host(self, layer: int, q: Tensor, layer_blocks: KvBlocks, kv: Tensor, out: Tensor) -> None:
        """They lie in blocks of the host pool, of which `layer_blocks` is this layer.

        The chunk's own are also `kv` [n, 2, num_kv_heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Made once per epoch."""

    @property
    def reads_tails(self) -> bool:
        """Whether it multiplies by 0 what lies in a block behind its sequence, which therefore must be finite."""
        ...

    @property
    def decode_on_device(self) -> "DecodeOnDevice | None":
        """None where what there is to do depends on lengths, so that the host has to know them."""
        ...

    def decode(self, context_tokens: NDArray[np.int64], block_tables: NDArray[np.int32]) -> DecodeAttention:
        """context_tokens [n] include the new token; block_tables [n, stride]."""
        ...

    def prefill(self, start: int, num_tokens: int, blocks: NDArray[np.int32]) -> PrefillAttention:
        """A chunk of `num_tokens` after `start` tokens; `blocks` [stride] hold the sequence up to the chunk's end."""
        ...
