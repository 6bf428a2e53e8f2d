"""Copies blocks between the tiers, from one type to the other where these differ."""

import time
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from gpu_svc.kv_cache import KvShape
from gpu_svc.kv_layout import KvBlocks, by_token, to_blocks
from gpu_svc.limits import Int32Array
from gpu_svc.link import Lane
from gpu_svc.packed_arrays import upload
from svc_common import cpu_kernels
from svc_common.decoder.threads import cpu_threads

_COPY_BYTES = 32 * 2**20  # Staging of a swap; bounds what a large swap needs beside the two caches.


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Blocks of all swaps of one direction: source[i] is copied to target[i]."""

    source: Int32Array
    target: Int32Array
    num_tokens: Int32Array
    """Of the sequence in block i; what lies behind them does not count."""

    def __len__(self) -> int:
        return len(self.source)


class Places:
    """The same on a device: int64 [n] each. They go there when they are first asked for, on the stream of that moment,
    and nobody waits for them.
    """

    def __init__(self, moves: BlockMoves, device: torch.device) -> None:
        self._moves = moves
        self._device = device

    def __len__(self) -> int:
        return len(self._moves)

    @cached_property
    def source(self) -> Tensor:
        return self._there(self._moves.source)

    @cached_property
    def target(self) -> Tensor:
        return self._there(self._moves.target)

    @cached_property
    def num_tokens(self) -> Tensor:
        return self._there(self._moves.num_tokens)

    def _there(self, numbers: Int32Array) -> Tensor:
        return upload(numbers.astype(np.int64), self._device)


def cross(lane: Lane, source: KvBlocks, target: KvBlocks, moves: BlockMoves, shape: KvShape) -> None:
    """Moves between the tiers, one direction. What travels is in the host's type."""
    if len(moves):
        copy = partial(copy_blocks, source, target, moves, shape.head_dim)
        lane.pace(len(moves) * shape.host_block_bytes, time.perf_counter(), copy)


def copy_blocks(source: KvBlocks, target: KvBlocks, moves: BlockMoves, head_dim: int) -> None:
    """Copies blocks of all layers; done when it returns."""
    if not len(moves):
        return
    if source.elements.dtype != target.elements.dtype and source.elements.is_cpu and target.elements.is_cpu:
        cpu_kernels.copy_blocks(
            cpu_threads(),
            source.elements,
            source.scales,
            moves.source,
            target.elements,
            target.scales,
            moves.target,
            moves.num_tokens,
            head_dim,
            "auto",
        )
        return
    copy_by_torch(source, target, moves, head_dim)
    if target.elements.is_cuda:
        # The source is memory of another process's making: it may be reused as soon as this returns.
        torch.cuda.current_stream(target.elements.device).synchronize()


def copy_by_torch(source: KvBlocks, target: KvBlocks, moves: BlockMoves, head_dim: int) -> None:
    """By torch's own operations, on any devices. What travels between two is in the host's type."""
    copy_at(source, target, Places(moves, torch.device("cpu")), head_dim)


def copy_at(source: KvBlocks, target: KvBlocks, places: Places, head_dim: int) -> None:
    """The same, of blocks of some layers, at places that may be on the device that has or addresses both."""
    block_bytes = source.elements[:, 0].numel() * source.elements.element_size()
    step = max(1, _COPY_BYTES // block_bytes)
    for start in range(0, len(places), step):
        part = slice(start, start + step)
        staged = source.select(1, places.source[part])
        if source.elements.dtype == target.elements.dtype:
            staged = staged.to(target.elements.device)
        elif source.elements.is_cpu:
            staged = staged.to(target.elements.device)
            staged = _converted(staged, target.elements.dtype, places.num_tokens[part], head_dim)
        else:
            staged = _converted(staged, target.elements.dtype, places.num_tokens[part], head_dim)
            staged = staged.to(target.elements.device)
        target.store(1, places.target[part], staged)


def _converted(blocks: KvBlocks, dtype: torch.dtype, num_tokens: Tensor, head_dim: int) -> KvBlocks:
    """Blocks [num_layers, n, ...] in another type; what lies behind a block's tokens [n] becomes 0."""
    kv = by_token(blocks, head_dim)
    unused = torch.arange(kv.shape[-2], device=num_tokens.device) >= num_tokens[:, None]
    return to_blocks(kv.masked_fill(unused.to(kv.device)[:, None, None, :, None], 0.0), dtype)
