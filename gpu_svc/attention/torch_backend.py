"""Attention by torch's own operations on any device: gathers blocks, then attends to them as one tensor."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.attention.backend import LayerWindows
from gpu_svc.kv_cache import block_rows
from gpu_svc.kv_layout import KvBlocks, by_token, keys_by_token
from svc_common.model.spec import ModelSpec

# K and V gathered for one call. On a CPU a group's gather should still be in cache when it is read.
_GROUP_BYTES = {"cpu": 8 * 2**20, "cuda": 512 * 2**20}
# A sequence joins a group of longer ones while at most this share of the group would be padding.
_MAX_PADDING = 0.2


class _Scratch:
    """One buffer for all gathers of an epoch, as large as the largest so far."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def gather(self, layer_blocks: Tensor, rows: Tensor) -> Tensor:
        """[len(rows), block_tokens * head_dim]; valid until the next gather."""
        source = layer_blocks.flatten(0, 2)
        shape = (len(rows), source.shape[1])
        size = shape[0] * shape[1]
        if self._buffer.numel() < size or self._buffer.dtype != source.dtype or self._buffer.device != source.device:
            self._buffer = torch.empty(size, dtype=source.dtype, device=source.device)
        return torch.index_select(source, 0, rows, out=self._buffer[:size].view(shape))


def _by_token(rows: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """K and V of gathered rows, first those of keys: both as `shape` [..., head_dim], token by token."""
    keys, values = rows.view(2, -1, rows.shape[1])
    return keys_by_token(keys, shape[-1]).reshape(shape), values.view(shape)


class TorchAttention:
    """The reference backend."""

    reads_tails = True
    decode_on_device = None

    def __init__(self, spec: ModelSpec, block_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is the compute type; the cache's own may differ."""
        self._spec = spec
        self._windows = LayerWindows(spec)
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._device = device
        self._scratch = _Scratch()

    def decode(self, context_tokens: NDArray[np.int64], block_tables: NDArray[np.int32]) -> "_TorchDecode":
        groups = self._windows.by_layer(lambda window: self._groups(window, context_tokens, block_tables))
        return _TorchDecode(groups, self._spec, self._dtype, self._scratch)

    def _groups(
        self, window: int, context_tokens: NDArray[np.int64], block_tables: NDArray[np.int32]
    ) -> list["_DecodeGroup"]:
        """Sorts sequences by length and cuts them into groups of little padding."""
        spec, block_tokens = self._spec, self._block_tokens
        first_blocks = np.zeros_like(context_tokens)
        if window:
            first_blocks = np.maximum(context_tokens - window, 0) // block_tokens
        num_blocks = -(-context_tokens // block_tokens) - first_blocks
        block_bytes = 2 * spec.num_kv_heads * block_tokens * spec.head_dim * self._dtype.itemsize
        max_blocks = _GROUP_BYTES[self._device.type] // block_bytes
        order = np.argsort(-num_blocks, kind="stable")
        return [
            self._group(window, order[start:end], context_tokens, first_blocks, num_blocks, block_tables)
            for start, end in _cut(num_blocks[order], max_blocks)
        ]

    def _group(
        self,
        window: int,
        members: NDArray[np.int64],
        context_tokens: NDArray[np.int64],
        first_blocks: NDArray[np.int64],
        num_blocks: NDArray[np.int64],
        block_tables: NDArray[np.int32],
    ) -> "_DecodeGroup":
        spec, block_tokens = self._spec, self._block_tokens
        width = int(num_blocks[members].max())
        columns = first_blocks[members, None] + np.arange(width)
        # Columns past a sequence's end repeat its last block; the mask hides them.
        last = (first_blocks + num_blocks - 1)[members, None]
        tables = block_tables[members[:, None], np.minimum(columns, last)].astype(np.int64)
        positions = first_blocks[members, None] * block_tokens + np.arange(width * block_tokens)
        ends = context_tokens[members, None]
        visible = positions < ends
        if window:
            visible &= positions >= ends - window
        mask = torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return _DecodeGroup(
            members=torch.from_numpy(members).to(self._device),
            rows=torch.from_numpy(block_rows(spec.num_kv_heads, tables).reshape(-1)).to(self._device),
            mask=mask[:, None, None, :].to(self._device),
        )

    def prefill(self, start: int, num_tokens: int, blocks: NDArray[np.int32]) -> "_TorchPrefill":
        return _TorchPrefill(self._windows.by_layer(lambda window: self._prefill(window, start, num_tokens, blocks)))

    def _prefill(self, window: int, start: int, num_tokens: int, blocks: NDArray[np.int32]) -> "_LayerPrefill":
        """A mask is built only where `is_causal` alone would not do."""
        spec, block_tokens = self._spec, self._block_tokens
        first_token = max(start - window + 1, 0) // block_tokens * block_tokens if window else 0
        mask = None
        if start or 0 < window < num_tokens or spec.attention_softcap:
            queries = torch.arange(start, start + num_tokens, device=self._device)[:, None]
            keys = torch.arange(first_token, start + num_tokens, device=self._device)
            mask = keys <= queries
            if window:
                mask &= keys > queries - window
        end_block = -(-(start + num_tokens) // block_tokens)
        table = blocks[None, first_token // block_tokens : end_block].astype(np.int64)
        rows = torch.from_numpy(block_rows(spec.num_kv_heads, table).reshape(-1)).to(self._device)
        return _LayerPrefill(start, num_tokens, first_token, table, mask, rows, spec, self._scratch)


def _cut(num_blocks: NDArray[np.int64], max_blocks: int) -> list[tuple[int, int]]:
    """Ranges of groups in lengths that fall: each at most `max_blocks` when padded, and with little padding."""
    ranges: list[tuple[int, int]] = []
    start, total = 0, 0
    for end, length in enumerate(num_blocks.tolist()):
        longest = int(num_blocks[start])
        padded = longest * (end - start + 1)
        if end > start and (padded > max_blocks or padded - total - length > _MAX_PADDING * padded):
            ranges.append((start, end))
            start, total = end, 0
        total += length
    if len(num_blocks):
        ranges.append((start, len(num_blocks)))
    return ranges


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    members: Tensor  # [m] rows of q
    rows: Tensor  # [2 * m * num_kv_heads * width] rows of the cache, see block_rows
    mask: Tensor  # [m, 1, 1, width * block_tokens], 0 or -inf


@dataclass(frozen=True, slots=True)
class _TorchDecode:
    groups: list[list[_DecodeGroup]]  # by layer
    spec: ModelSpec
    dtype: torch.dtype
    scratch: _Scratch

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        spec = self.spec
        group_size = spec.num_q_heads // spec.num_kv_heads
        for group in self.groups[layer]:
            num_members = len(group.members)
            gathered = self.scratch.gather(layer_blocks, group.rows)
            k, v = _by_token(gathered, (num_members, spec.num_kv_heads, -1, spec.head_dim))
            k, v = k.to(self.dtype), v.to(self.dtype)
            # The query heads of one KV head stand where the query tokens of a prompt would.
            grouped = q[group.members].view(num_members, spec.num_kv_heads, group_size, spec.head_dim)
            if spec.attention_softcap:
                attended = _attend_capped(spec, grouped, k, v, group.mask)
            else:
                attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=spec.softmax_scale)
            out[group.members] = attended.reshape(num_members, spec.num_q_heads, spec.head_dim)


def _attend_capped(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [m, num_kv_heads, rows, head_dim], k and v [m, num_kv_heads, keys, head_dim]; `mask` is added, 0 or -inf."""
    scores = (q @ k.transpose(-2, -1)).float().mul_(spec.softmax_scale / spec.attention_softcap)
    scores = scores.tanh_().mul_(spec.attention_softcap).add_(mask)
    return scores.softmax(-1).to(v.dtype) @ v


@dataclass(frozen=True, slots=True)
class _TorchPrefill:
    by_layer: list["_LayerPrefill"]

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        self.by_layer[layer].run(q, layer_blocks, out)

    def run_on_host(self, layer: int, q: Tensor, layer_blocks: KvBlocks, kv: Tensor, out: Tensor) -> None:
        self.by_layer[layer].run_on_host(q, layer_blocks, kv, out)


@dataclass(frozen=True, slots=True)
class _LayerPrefill:
    start: int
    num_tokens: int
    first_token: int  # that any of the chunk sees; a multiple of block_tokens
    table: NDArray[np.int64]  # [1, stride] blocks from that token on
    mask: Tensor | None  # [num_tokens, num_keys], true where visible; None: plainly causal
    rows: Tensor  # rows of these blocks in the cache, see block_rows
    spec: ModelSpec
    scratch: _Scratch

    def run(self, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        k, v = self._by_token(self.scratch.gather(layer_blocks, self.rows))
        num_keys = self.start + self.num_tokens - self.first_token
        self._attend(q, k[:, :num_keys], v[:, :num_keys], out)

    def run_on_host(self, q: Tensor, layer: KvBlocks, kv: Tensor, out: Tensor) -> None:
        """Only the past is fetched from the host."""
        num_past = max(self.start - self.first_token, 0)
        block_tokens = layer.elements.shape[-1] // self.spec.head_dim
        past_blocks = torch.from_numpy(self.table[0, : -(-num_past // block_tokens)])
        fetched = by_token(layer.select(0, past_blocks).to(q.device), self.spec.head_dim)
        past = fetched.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_past]  # [2, num_kv_heads, tokens, head_dim]
        own = kv.permute(1, 2, 0, 3)
        if layer.scales is None:
            # Rounded to the KV type like the past, so that cutting a prompt elsewhere changes nothing.
            own = own.to(layer.elements.dtype)
        k, v = torch.cat([past.to(q.dtype), own.to(q.dtype)], dim=2)
        self._attend(q, k, v, out)

    def _by_token(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [num_kv_heads, tokens, head_dim] of gathered rows."""
        num_tokens = rows.numel() // (2 * self.spec.num_kv_heads * self.spec.head_dim)
        return _by_token(rows, (self.spec.num_kv_heads, num_tokens, self.spec.head_dim))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        spec = self.spec
        if spec.attention_softcap and self.mask is not None:
            group_size = spec.num_q_heads // spec.num_kv_heads
            grouped = q.reshape(len(q), spec.num_kv_heads, group_size, spec.head_dim).permute(1, 2, 0, 3)
            k, v = (part.to(q.dtype).unsqueeze(1) for part in (k, v))
            hidden = torch.zeros(self.mask.shape, device=q.device).masked_fill_(~self.mask, float("-inf"))
            attended = _attend_capped(spec, grouped, k, v, hidden)
            out.copy_(attended.flatten(0, 1).transpose(0, 1))
            return
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.to(q.dtype).unsqueeze(0),
            v.to(q.dtype).unsqueeze(0),
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=spec.softmax_scale,
            enable_gqa=spec.num_q_heads != spec.num_kv_heads,
        )
        out.copy_(attended[0].transpose(0, 1))
