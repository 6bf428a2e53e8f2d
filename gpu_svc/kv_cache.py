"""Keys and values in blocks: the GPU's own cache, row indices into it, and block copies between the tiers.

Both tiers have the layout [num_layers, num_blocks, 2, num_kv_heads, block_tokens, head_dim], so that a swap copies
blocks as they are.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from svc_common.model.spec import ModelSpec

_COPY_BYTES = 32 * 2**20  # Staging of a swap; bounds what a large swap needs beside the two caches.


@dataclass(frozen=True, slots=True)
class KvShape:
    """One KV block and what it is made of."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, block_tokens: int, dtype: torch.dtype) -> "KvShape":
        return cls(spec.num_layers, spec.num_kv_heads, block_tokens, spec.head_dim, dtype)

    @property
    def token_bytes(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """One block over all layers."""
        return self.token_bytes * self.block_tokens

    def blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of a cache."""
        return (self.num_layers, num_blocks, 2, self.num_kv_heads, self.block_tokens, self.head_dim)


class GpuKvCache:
    """The cache on the device, within a cap of bytes."""

    def __init__(self, shape: KvShape, cap_bytes: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = cap_bytes // shape.block_bytes
        # Zeroed: attention multiplies the unused tail of a block by 0, which must not meet a NaN.
        self.blocks = torch.zeros(shape.blocks(self.num_blocks), dtype=shape.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def write(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Stores kv [n, 2, num_kv_heads, head_dim] at rows [n * 2 * num_kv_heads] from `token_rows`."""
        write_rows(self.blocks[layer], rows, kv)


def write_rows(layer_blocks: Tensor, rows: Tensor, kv: Tensor) -> None:
    """Stores kv [n, 2, num_kv_heads, head_dim] into one layer of a cache, rows by `token_rows`."""
    width = kv.shape[-1]
    source = kv.reshape(-1, width).to(device=layer_blocks.device, dtype=layer_blocks.dtype)
    layer_blocks.view(-1, width).index_copy_(0, rows, source)


def token_rows(shape: KvShape, blocks: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n * 2 * num_kv_heads]: where token i's K and V lie, at `offsets[i]` in block `blocks[i]`.

    Counts rows of head_dim elements within one layer.
    """
    heads = np.arange(2 * shape.num_kv_heads)
    rows = (blocks[:, None] * len(heads) + heads) * shape.block_tokens + offsets[:, None]
    flat: NDArray[np.int64] = rows.reshape(-1)
    return flat


def block_rows(shape_kv_heads: int, block_tables: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, n, num_kv_heads, stride]: where the blocks of tables [n, stride] lie, K then V, head by head.

    Counts rows of block_tokens * head_dim elements within one layer. Gathered in this order, a head's tokens are
    contiguous.
    """
    kv_heads = np.arange(2 * shape_kv_heads).reshape(2, 1, shape_kv_heads, 1)
    return block_tables[None, :, None, :] * (2 * shape_kv_heads) + kv_heads


def copy_blocks(source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor) -> None:
    """Copies blocks of all layers from one tier to the other; done when it returns."""
    if not len(source_blocks):
        return
    block_bytes = source[:, 0].numel() * source.element_size()
    step = max(1, _COPY_BYTES // block_bytes)
    for start in range(0, len(source_blocks), step):
        staged = source.index_select(1, source_blocks[start : start + step].to(source.device))
        target.index_copy_(1, target_blocks[start : start + step].to(target.device), staged.to(target.device))
    if target.is_cuda:
        # The source is memory of another process's making: it may be reused as soon as this returns.
        torch.cuda.current_stream(target.device).synchronize()
