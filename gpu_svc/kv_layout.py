"""How keys and values lie in a block of each type, as torch's operations see it; csrc/layout.h says the same.

Values lie token by token, keys dimension by dimension. In bf16 and int8 two dimensions of a key lie together, in int8
also two tokens of a value; what is left of an odd number follows by itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST_INT8 = 127
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """A cache, a layer or some blocks of it."""

    elements: Tensor
    """[..., 2, num_kv_heads, block_tokens * head_dim]"""
    scales: Tensor | None = None
    """[..., 2, num_kv_heads], float32: what a number in int8 counts."""

    def __getitem__(self, layer: int | slice) -> "KvBlocks":
        """Of one layer, or of some."""
        return KvBlocks(self.elements[layer], None if self.scales is None else self.scales[layer])

    def to(self, device: torch.device) -> "KvBlocks":
        return KvBlocks(self.elements.to(device), None if self.scales is None else self.scales.to(device))

    def select(self, dim: int, index: Tensor) -> "KvBlocks":
        """A copy of what `index` names along an axis that both have."""
        index = index.to(self.elements.device)
        scales = None if self.scales is None else self.scales.index_select(dim, index)
        return KvBlocks(_wide(self.elements).index_select(dim, index).view(self.elements.dtype), scales)

    def store(self, dim: int, index: Tensor, part: "KvBlocks") -> None:
        """The reverse of `select`."""
        index = index.to(self.elements.device)
        _wide(self.elements).index_copy_(dim, index, _wide(part.elements))
        if self.scales is not None:
            assert part.scales is not None
            self.scales.index_copy_(dim, index, part.scales)


def _wide(elements: Tensor) -> Tensor:
    """The same bytes in larger pieces, if they can be: a device's kernel moves one at a time, over the link maybe."""
    whole = elements.shape[-1] * elements.element_size() % 8 == 0 and elements.stride(-1) == 1
    return elements.view(torch.int64) if whole else elements


def by_token(blocks: KvBlocks, head_dim: int) -> Tensor:
    """[..., 2, num_kv_heads, block_tokens, head_dim]; of int8 in fp32, of others in their own type."""
    keys, values = blocks.elements.unbind(-3)
    kv = torch.stack([keys_by_token(keys, head_dim), values_by_token(values, head_dim)], dim=-4)
    return kv if blocks.scales is None else kv * blocks.scales[..., None, None]


def to_blocks(kv: Tensor, dtype: torch.dtype) -> KvBlocks:
    """The reverse of `by_token`, rounded to `dtype`. In int8 the scale is of all the block's tokens."""
    scales = None
    if dtype == torch.int8:
        scales = kv.float().abs().amax((-2, -1)) / _LARGEST_INT8
        scales = torch.where(scales < _SMALLEST_SCALE, 0.0, scales)
        # As the kernels do: an infinite number makes its block NaN.
        scales = torch.where(scales.isinf(), torch.nan, scales)
        kv = (kv / scales[..., None, None]).nan_to_num(0.0, 0.0, 0.0).round()
    keys, values = kv.to(dtype).unbind(-4)
    keys = _interleave(keys, keys.shape[-1] // 2 * 2 if pairs_keys(dtype) else 0)
    values = _interleave(values.transpose(-2, -1), values.shape[-2] // 2 * 2 if dtype == torch.int8 else 0)
    return KvBlocks(torch.stack([keys, values], dim=-3), scales)


def keys_by_token(rows: Tensor, head_dim: int) -> Tensor:
    """[..., block_tokens, head_dim] of keys [..., block_tokens * head_dim] as blocks hold them, without scales."""
    return _by_row(*key_views(rows, head_dim))


def values_by_token(rows: Tensor, head_dim: int) -> Tensor:
    """The same of values."""
    if rows.dtype != torch.int8:
        return rows.view(*rows.shape[:-1], rows.shape[-1] // head_dim, head_dim)
    num_paired = rows.shape[-1] // head_dim // 2 * 2
    return _by_row(*_views(rows, head_dim, num_paired)).transpose(-2, -1)


def key_views(rows: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Dimensions in pairs [..., m, block_tokens, 2] and by themselves [..., head_dim - 2 * m, block_tokens]."""
    return _views(rows, rows.shape[-1] // head_dim, head_dim // 2 * 2 if pairs_keys(rows.dtype) else 0)


def pairs_keys(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.int8)


def _views(rows: Tensor, n: int, num_paired: int) -> tuple[Tensor, Tensor]:
    """Rows [..., n * m] as [..., num_paired / 2, n, 2] and [..., m - num_paired, n]."""
    pairs = rows[..., : num_paired * n].view(*rows.shape[:-1], num_paired // 2, n, 2)
    return pairs, rows[..., num_paired * n :].view(*rows.shape[:-1], rows.shape[-1] // n - num_paired, n)


def _by_row(pairs: Tensor, singles: Tensor) -> Tensor:
    """[..., n, m] of what `_views` gives."""
    if not pairs.shape[-3]:
        return singles.transpose(-2, -1)
    return torch.cat([pairs.transpose(-3, -2).flatten(-2), singles.transpose(-2, -1)], dim=-1)


def _interleave(rows: Tensor, num_paired: int) -> Tensor:
    """[..., n * m] of rows [..., n, m], as `_views` takes it."""
    pairs = rows[..., :num_paired].reshape(*rows.shape[:-1], num_paired // 2, 2).transpose(-3, -2).flatten(-3)
    return torch.cat([pairs, rows[..., num_paired:].transpose(-2, -1).flatten(-2)], dim=-1)
