"""Keys and values in blocks: what a block is made of, the GPU's own cache, and writes of new tokens.

Both tiers have the shape [num_layers, num_blocks, 2, num_kv_heads, block_tokens * head_dim]. How numbers lie in a
block of each type: kv_layout.py.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.device_kernels import has_triton
from gpu_svc.kv_layout import KvBlocks, key_views
from svc_common import cpu_kernels
from svc_common.decoder.threads import cpu_threads
from svc_common.model.spec import ModelSpec

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvShape:
    """One KV block and what it is made of."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype
    """On the GPU."""
    host_dtype: torch.dtype
    """On the host; int8 has a scale for each block, layer, K or V, and head."""

    @classmethod
    def of(
        cls, spec: ModelSpec, block_tokens: int, dtype: torch.dtype, host_dtype: torch.dtype | None = None
    ) -> "KvShape":
        """`host_dtype`: as on the GPU where it is None."""
        return cls(spec.num_layers, spec.num_kv_heads, block_tokens, spec.head_dim, dtype, host_dtype or dtype)

    @property
    def _token_numbers(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        """One block over all layers on the GPU."""
        return self._token_numbers * self.dtype.itemsize * self.block_tokens

    @property
    def host_layer_token_bytes(self) -> int:
        """K and V of one token in one layer on the host, without scales."""
        return 2 * self.num_kv_heads * self.head_dim * self.host_dtype.itemsize

    @property
    def host_token_bytes(self) -> int:
        """K and V of one token over all layers on the host, without scales."""
        return self.num_layers * self.host_layer_token_bytes

    @property
    def host_block_bytes(self) -> int:
        """One block over all layers on the host, scales included."""
        num_scales = 2 * self.num_layers * self.num_kv_heads if self.host_dtype == torch.int8 else 0
        return self.host_token_bytes * self.block_tokens + num_scales * _SCALE_BYTES

    def above(self, cpu_layers: int) -> "KvShape":
        """Of a block without the first layers, whose KV is not in the tier's pool; of no layers it takes no bytes."""
        return replace(self, num_layers=self.num_layers - cpu_layers)

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
    """The cache on the device, of all layers or of those from `first_layer` on."""

    def __init__(
        self, shape: KvShape, num_blocks: int, device: torch.device, first_layer: int = 0, has_scratch: bool = False
    ) -> None:
        """`has_scratch`: one block more, that no plan knows of, for rows of no sequence."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.first_layer = first_layer
        self.scratch_block = num_blocks if has_scratch else None
        # Zeroed: some attention multiplies the unused tail of a block by 0, which must not meet a NaN.
        self.blocks = torch.zeros(shape.blocks(num_blocks + has_scratch), dtype=shape.dtype, device=device)
        self._append = write_kv_by_index
        if has_triton(device):
            from gpu_svc.triton_ops import append_kv  # Torch for CPUs brings no Triton.

            self._append = append_kv

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def layer(self, layer: int) -> Tensor:
        """[num_blocks, 2, num_kv_heads, block_tokens * head_dim] of a layer of the model."""
        return self.blocks[layer - self.first_layer]

    def clear(self, blocks: NDArray[np.int32]) -> None:
        """Zeroes blocks [n], in whose tails their last owner may have left a NaN."""
        if len(blocks):
            self.blocks.index_fill_(1, torch.from_numpy(blocks).long().to(self.blocks.device), 0)

    def clear_tails(self, blocks: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        """Zeroes what lies behind the first num_tokens [n] of blocks [n]."""
        for block, num in zip(blocks.tolist(), num_tokens.tolist(), strict=True):
            if num < self.shape.block_tokens:
                keys, values = self.blocks[:, block].unbind(1)
                pairs, singles = key_views(keys, self.shape.head_dim)
                pairs[..., num:, :] = 0
                singles[..., num:] = 0
                values.view(*values.shape[:-1], -1, self.shape.head_dim)[..., num:, :] = 0

    def write(self, layer: int, places: KvPlaces, kv: Tensor) -> None:
        """Stores kv [n, 2, num_kv_heads, head_dim] in a layer of the model."""
        if places.index is None:
            write_kv(KvBlocks(self.layer(layer)), places, kv)
        else:
            self._append(self.layer(layer), *places.index, kv)


def write_kv(layer: KvBlocks, places: KvPlaces, kv: Tensor) -> None:
    """Stores kv [n, 2, num_kv_heads, head_dim] in one layer of a cache; all of it lies in the CPU's memory."""
    cpu_kernels.write_kv(cpu_threads(), layer.elements, places.blocks, places.offsets, kv, "auto", layer.scales)


def write_kv_by_index(layer_blocks: Tensor, blocks: Tensor, offsets: Tensor, kv: Tensor) -> None:
    """`write_kv` by torch's own operations, on any device, in floats; blocks and offsets [n], int64."""
    head_dim = kv.shape[-1]
    keys, values = kv.to(layer_blocks.dtype).unbind(1)
    pairs, singles = key_views(layer_blocks[:, 0], head_dim)
    num_paired = 2 * pairs.shape[2]
    pairs[blocks, :, :, offsets] = keys[..., :num_paired].reshape(*keys.shape[:-1], num_paired // 2, 2)
    singles[blocks, :, :, offsets] = keys[..., num_paired:]
    layer_values = layer_blocks[:, 1]
    layer_values.view(*layer_values.shape[:-1], -1, head_dim)[blocks, :, offsets] = values


def block_rows(shape_kv_heads: int, block_tables: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, n, num_kv_heads, stride]: where the blocks of tables [n, stride] lie, K then V, head by head.

    Counts rows of block_tokens * head_dim elements within one layer. Gathered in this order, a head's blocks are
    contiguous.
    """
    kv_heads = np.arange(2 * shape_kv_heads).reshape(2, 1, shape_kv_heads, 1)
    return block_tables[None, :, None, :] * (2 * shape_kv_heads) + kv_heads
