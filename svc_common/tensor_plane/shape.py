"""The attention that one region is made for; both sides must name the same."""

from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from svc_common.tensor_plane import _plane

_NUMPY_DTYPES: dict[str, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int8": np.int8}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Type of arrays over the region. numpy knows no bf16: its bits come as uint16."""
    return np.dtype(_NUMPY_DTYPES[name])


@dataclass(frozen=True)
class RegionShape:
    """Fixed for the life of a region."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    """Divides num_q_heads."""
    head_dim: int
    """At most 256."""
    block_tokens: int
    kv_dtype: str
    """Type of the pool: "fp32", "bf16", "fp16" or "int8"."""
    exchange_dtype: str
    """Type of q, k, v and out in the exchange slots; not "int8"."""
    max_sequences: int
    """Most decodes in one sub-batch."""
    softmax_scale: float
    """Factor on q·k before the softmax."""
    softcap: float = 0.0
    """c: a score s counts as c * tanh(s / c); 0: as it is."""
    sliding_windows: tuple[int, ...] = ()
    """By layer: tokens each query sees, itself included, or 0 for all. Empty: all in every layer."""
    num_cpu_layers: int = 0
    """The first of num_layers, which the CPU attention service computes; what follows is of use only with such."""
    num_gpu_blocks: int = 0
    """Blocks of the executor's own cache: the CPU layers' part of these lies in the region."""
    hidden_size: int = 0
    max_tokens: int = 0
    """Most that pass the CPU layers in one iteration."""

    def __str__(self) -> str:
        """In one short line, for logs."""
        windows = Counter(window for window in self.sliding_windows if window)
        parts = [
            f"{self.num_layers} layers, {self.num_cpu_layers} of them on the CPU",
            f"heads {self.num_q_heads} / {self.num_kv_heads} of {self.head_dim}",
            f"blocks of {self.block_tokens} tokens in {self.kv_dtype}, exchanged in {self.exchange_dtype}",
            f"at most {self.max_sequences} sequences",
            *(f"windows of {window} tokens in {num} layers" for window, num in sorted(windows.items())),
            *([f"softcap {self.softcap:g}"] if self.softcap else []),
        ]
        return ", ".join(parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, scales included."""
        heads = self.num_layers * 2 * self.num_kv_heads
        num_scales = heads if self.kv_dtype == "int8" else 0
        return heads * self.block_tokens * self.head_dim * numpy_dtype(self.kv_dtype).itemsize + 4 * num_scales

    def to_native(self) -> _plane.Shape:
        """Raises PlaneError where the shape is impossible."""
        return _plane.Shape.make(**asdict(self))
