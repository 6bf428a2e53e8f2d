"""Keys and values in blocks: the GPU's own cache, writes of new tokens, and block copies between the tiers.

Both tiers have the layout [num_layers, num_blocks, 2, num_kv_heads, block_tokens * head_dim], so that a swap copies
blocks as they are. Values lie token by token, keys dimension by dimension: svc_common/tensor_plane/csrc/layout.h.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.threads import cpu_threads
from svc_common import cpu_kernels
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
        return (self.num_layers, num_blocks, 2, self.num_kv_heads, self.block_tokens * self.head_dim)


@dataclass(frozen=True, slots=True)
class KvPlaces:
    """Where the K and V of n tokens lie: token i's at `offsets[i]` in block `blocks[i]`."""

    blocks: NDArray[np.int32]  # [n]
    offsets: NDArray[np.int32]  # [n]
    index: tuple[Tensor, Tensor] | None
    """Both as int64 on the cache's device; None where that is the CPU."""

    @classmethod
    def on(cls, device: torch.device, blocks: NDArray[np.int64], offsets: NDArray[np.int64]) -> "KvPlaces":
        index = None
        if device.type != "cpu":
            index = torch.from_numpy(blocks).to(device), torch.from_numpy(offsets).to(device)
        return cls(blocks.astype(np.int32), offsets.astype(np.int32), index)

    def __len__(self) -> int:
        return len(self.blocks)


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

    def write(self, layer: int, places: KvPlaces, kv: Tensor) -> None:
        """Stores kv [n, 2, num_kv_heads, head_dim]."""
        write_kv(self.blocks[layer], places, kv)


def write_kv(layer_blocks: Tensor, places: KvPlaces, kv: Tensor) -> None:
    """Stores kv [n, 2, num_kv_heads, head_dim], which lies on the same device, in one layer of a cache."""
    if places.index is None:
        cpu_kernels.write_kv(cpu_threads(), layer_blocks, places.blocks, places.offsets, kv, "auto")
    else:
        write_kv_by_index(layer_blocks, *places.index, kv)


def write_kv_by_index(layer_blocks: Tensor, blocks: Tensor, offsets: Tensor, kv: Tensor) -> None:
    """`write_kv` by torch's own operations, on any device; blocks and offsets [n], int64."""
    head_dim = kv.shape[-1]
    keys, values = kv.to(layer_blocks.dtype).unbind(1)
    pairs, singles = _key_views(layer_blocks[:, 0], head_dim)
    num_paired = 2 * pairs.shape[2]
    pairs[blocks, :, :, offsets] = keys[..., :num_paired].reshape(*keys.shape[:-1], num_paired // 2, 2)
    singles[blocks, :, :, offsets] = keys[..., num_paired:]
    layer_values = layer_blocks[:, 1]
    layer_values.view(*layer_values.shape[:-1], -1, head_dim)[blocks, :, offsets] = values


def keys_by_token(rows: Tensor, head_dim: int) -> Tensor:
    """[..., block_tokens, head_dim] of keys [..., block_tokens * head_dim] as blocks hold them."""
    pairs, singles = _key_views(rows, head_dim)
    if not pairs.shape[-3]:
        return singles.transpose(-2, -1)
    return torch.cat([pairs.transpose(-3, -2).flatten(-2), singles.transpose(-2, -1)], dim=-1)


def _key_views(rows: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Dimensions in pairs [..., m, block_tokens, 2] and by themselves [..., head_dim - 2 * m, block_tokens]."""
    block_tokens = rows.shape[-1] // head_dim
    num_pairs = head_dim // 2 if rows.dtype == torch.bfloat16 else 0
    num_paired = 2 * num_pairs * block_tokens
    pairs = rows[..., :num_paired].view(*rows.shape[:-1], num_pairs, block_tokens, 2)
    return pairs, rows[..., num_paired:].view(*rows.shape[:-1], head_dim - 2 * num_pairs, block_tokens)


def block_rows(shape_kv_heads: int, block_tables: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, n, num_kv_heads, stride]: where the blocks of tables [n, stride] lie, K then V, head by head.

    Counts rows of block_tokens * head_dim elements within one layer. Gathered in this order, a head's blocks are
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
