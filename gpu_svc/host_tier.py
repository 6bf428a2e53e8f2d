"""The executor's side of the host tier: KV blocks in shared pools, and decode attention done by a service for each.

A sequence lies in one pool. Blocks have one number through all pools, in plans and in the executor's state; each
service knows its own from 0 on.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.cuda.device_side import DeviceSide
from gpu_svc.cuda.swaps import LayeredSwaps, Move
from gpu_svc.kv_cache import KvPlaces, KvShape, write_kv
from gpu_svc.kv_layout import KvBlocks
from gpu_svc.kv_swap import BlockMoves, cross
from gpu_svc.limits import Int32Array
from gpu_svc.link import Link
from gpu_svc.region_tensors import exchange_of, lower_pool_of, pool_of
from svc_common.tensor_plane import CpuSubBatch, LayerBatch, Report, TensorPlane

# Far longer than the CPU attends for in one layer; the service's death is noticed long before.
_TIMEOUT_S = 5.0
# The same for a batch on its way through the CPU layers, and for attention, which may have to wait for one of them.
_LAYERS_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class CpuWork:
    """CPU decodes of one sub-batch in one pool: the same for all layers."""

    slot: int
    """Exchange slot."""
    context_tokens: NDArray[np.int32]
    """[n], the new token included."""
    block_tables: NDArray[np.int32]
    """[n, stride], the pool's own numbers."""
    rows: slice
    """Of the sub-batch's."""
    pool: int = 0

    def __len__(self) -> int:
        return len(self.context_tokens)


class HostPool:
    """One attached CPU attention service. Raises PlaneError from any method once that is lost."""

    def __init__(self, plane: TensorPlane, num_threads: int, on_device: DeviceSide | None = None) -> None:
        """`on_device`: what a GPU does with the plane's region by itself, if anything."""
        self._plane = plane
        self.on_device = on_device
        self._doorbells = on_device.doorbells if on_device else None
        self._number = 0
        self.has_work = False
        """Since `begin`."""
        self._place_of: dict[int, int] = {}  # of this iteration's layer batches
        self.num_threads = num_threads
        self.num_blocks = plane.num_blocks
        self.blocks = pool_of(plane)
        """The shared pool, all layers but those that the CPU computes."""
        self.lower = lower_pool_of(plane)
        """The lower pool: those layers, for both tiers; see lower_pool.py."""
        self.first_layer = len(plane.lower)
        """Of `blocks`."""
        self._hidden = torch.from_numpy(plane.hidden)
        self._timeout_s = answer_timeout_s(plane)
        self._exchange = [exchange_of(plane, slot) for slot in range(2)]
        self._finish_ns = 0
        self._announced_blocks = 0

    @property
    def rings_by_itself(self) -> bool:
        """Whether the device does, and `submit` and `wait` only enqueue."""
        return self._doorbells is not None

    @property
    def wait_ns(self) -> int:
        """Spent in `wait`, `take_hidden` and `finish` so far; where a device waits, it waited so long."""
        waited_ns = self._plane.wait_ns + self._finish_ns
        return waited_ns + self._doorbells.wait_ns if self._doorbells else waited_ns

    def begin(
        self,
        work: Sequence[CpuWork],
        num_blocks_used: int,
        trace: bool = False,
        layers: range | None = None,
        layer_batches: Sequence[LayerBatch] = (),
        in_turn: bool = False,
    ) -> None:
        """Describes an iteration: its CPU decodes in the order in which they are submitted, and the batches that pass
        the CPU layers. Without any it says at most how many blocks are in use.

        Each of `layers`, or of all, submits the decodes of one sub-batch after the other; or, `in_turn`, all layers of
        one sub-batch come before those of the next.
        """
        self.has_work = bool(work or layer_batches)
        if not self.has_work and num_blocks_used == self._announced_blocks:
            return
        self._announced_blocks = num_blocks_used
        self._number += 1
        self._place_of = {id(batch): place for place, batch in enumerate(layer_batches)}
        sub_batches = [CpuSubBatch(part.slot, part.context_tokens, part.block_tables) for part in work]
        rings = self._doorbells is not None
        self._plane.begin(self._number, sub_batches, num_blocks_used, trace, layers, layer_batches, in_turn, rings)
        if self._doorbells is not None and self.has_work:
            self._doorbells.begin()

    def submit(self, slot: int, q: Tensor, kv: Tensor, rows: slice) -> None:
        """Hands over rows of q [n, num_q_heads, head_dim] and kv [n, 2, num_kv_heads, head_dim]: the slot's next layer.

        Where the device rings, its streams only get told. Else copies from a GPU end only when the data is there, so
        the doorbell rings after it.
        """
        num = rows.stop - rows.start
        if self._doorbells is None and q.is_cpu:
            self._plane.submit_rows(slot, q, kv, rows.start, num)
            return
        to_q, to_k, to_v, _ = self._exchange[slot]
        copies = (to_q[:num], q[rows]), (to_k[:num], kv[rows, 0]), (to_v[:num], kv[rows, 1])
        if self._doorbells is not None:
            self._doorbells.submit(slot, copies)
            return
        for target, source in copies:
            target.copy_(source)
        self._plane.submit(slot)

    def wait(self, slot: int, out: Tensor, rows: slice) -> None:
        """Writes the attention of this slot's last submit to rows of out [n, num_q_heads, head_dim]."""
        num = rows.stop - rows.start
        if self._doorbells is not None:
            self._doorbells.wait(slot, out[rows], self._exchange[slot][3][:num])
            return
        if out.is_cpu:
            self._plane.wait_rows(slot, out, rows.start, num, self._timeout_s)
            return
        self._plane.wait(slot, self._timeout_s)
        out[rows].copy_(self._exchange[slot][3][:num])

    def put_hidden(self, batch: LayerBatch, hidden: Tensor) -> None:
        """Hands over hidden [n, hidden_size] for the CPU layers; `submit_layers` rings for all."""
        self._rows(batch).copy_(hidden)

    def submit_layers(self) -> None:
        """Once all batches are put that `begin` named."""
        self._plane.submit_layers()

    def take_hidden(self, batch: LayerBatch, hidden: Tensor) -> None:
        """Waits for one of those batches and writes what the CPU layers made of it to hidden [n, hidden_size]."""
        self._plane.wait_layers(self._place_of[id(batch)], self._timeout_s)
        hidden.copy_(self._rows(batch))

    def _rows(self, batch: LayerBatch) -> Tensor:
        return self._hidden[batch.first_row : batch.first_row + batch.num_tokens]

    def finish(self) -> Report:
        """Ends an iteration that had work for the CPU."""
        if self._doorbells is not None:
            self._doorbells.finish()
        start = time.perf_counter_ns()
        report = self._plane.finish(self._timeout_s)
        self._finish_ns += time.perf_counter_ns() - start
        return report

    def layer(self, layer: int) -> KvBlocks:
        """Blocks of a layer of the model: of the lower pool, where it is one of the CPU's."""
        return self.lower[layer] if layer < self.first_layer else self.blocks[layer - self.first_layer]

    def write(self, layer: int, places: KvPlaces, kv: Tensor) -> None:
        """Stores a prefill chunk's kv [n, 2, num_kv_heads, head_dim]; `places` are the CPU's, in that layer's pool."""
        write_kv(self.layer(layer), places, kv.cpu())

    @property
    def is_alive(self) -> bool:
        return self._plane.peer_alive()

    def close(self) -> None:
        """Gives the pool up; memory is unmapped once the last tensor on it is gone."""
        if self.on_device is not None:
            self.on_device.close()
        self._plane.close()
        self.blocks = self.lower = KvBlocks(torch.empty(0))
        self._hidden = torch.empty(0)
        self._exchange = []


class HostTier:
    """All attached services. Raises PlaneError from any method once one of them is lost."""

    def __init__(self, pools: Sequence[HostPool | None]) -> None:
        """In the order of the configuration; None for a service that could not be attached."""
        self.pools = tuple(pools)
        self.pool_blocks = tuple([pool.num_blocks if pool else 0 for pool in pools])
        """By pool."""
        self.first_blocks = (0, *accumulate(self.pool_blocks[:-1]))
        """Number of each pool's first block."""
        self.num_blocks = sum(self.pool_blocks)
        self._attached = [pool for pool in pools if pool]
        self._swaps = _layered_swaps(self._attached)

    def pool(self, number: int) -> HostPool:
        """One that is attached."""
        pool = self.pools[number]
        assert pool is not None
        return pool

    @property
    def only_pool(self) -> HostPool:
        """The one whose service computes CPU layers: where there are such layers there is no other."""
        assert len(self.pools) == 1
        return self.pool(0)

    @property
    def uses_stream_doorbells(self) -> bool:
        """Whether `submit` and `wait` only enqueue, in all pools."""
        return all(pool.rings_by_itself for pool in self._attached)

    @property
    def wait_ns(self) -> int:
        """As of HostPool, of all."""
        return sum([pool.wait_ns for pool in self._attached])

    def begin(
        self,
        work: Sequence[CpuWork],
        blocks_used: Sequence[int],
        trace: bool = False,
        layers: range | None = None,
        layer_batches: Sequence[LayerBatch] = (),
        in_turn: bool = False,
    ) -> None:
        """Describes an iteration to all services, as HostPool does; `blocks_used` by pool."""
        assert not layer_batches or len(self.pools) == 1
        for number, pool in enumerate(self.pools):
            if pool:
                own = [part for part in work if part.pool == number]
                pool.begin(own, blocks_used[number], trace, layers, layer_batches, in_turn)

    def submit(self, work: Sequence[CpuWork], q: Tensor, kv: Tensor) -> None:
        """Hands one sub-batch's rows of q [n, num_q_heads, head_dim] and kv [n, 2, num_kv_heads, head_dim] over."""
        for part in work:
            self.pool(part.pool).submit(part.slot, q, kv, part.rows)

    def wait(self, work: Sequence[CpuWork], out: Tensor) -> None:
        """Writes the attention of what was submitted last to rows of out [n, num_q_heads, head_dim]."""
        for part in work:
            self.pool(part.pool).wait(part.slot, out, part.rows)

    def finish(self) -> dict[int, Report]:
        """Ends an iteration: reports by pool, of those that had work."""
        return {number: pool.finish() for number, pool in enumerate(self.pools) if pool and pool.has_work}

    def swap(self, link: Link, gpu: KvBlocks, to_host: BlockMoves, to_gpu: BlockMoves, shape: KvShape) -> None:
        """All moves to the host, then all to the GPU, which may reuse the blocks.

        Done when it returns, or else on the way beside the layers: `await_layer` or `settle` comes before any use.
        """
        out = [
            (pool, BlockMoves(to_host.source[part], blocks, to_host.num_tokens[part]))
            for pool, part, blocks in self._by_pool(to_host.target)
        ]
        back = [
            (pool, BlockMoves(blocks, to_gpu.target[part], to_gpu.num_tokens[part]))
            for pool, part, blocks in self._by_pool(to_gpu.source)
        ]
        if self._swaps is not None:
            self._swaps.swap(gpu, _on_device(out), _on_device(back), shape.head_dim)
            return
        for pool, moves in out:
            cross(link.to_host, gpu, pool.blocks, moves, shape)
        for pool, moves in back:
            cross(link.to_device, pool.blocks, gpu, moves, shape)

    @property
    def swaps_beside_layers(self) -> bool:
        """Whether `swap` only enqueues."""
        return self._swaps is not None

    def await_layer(self, layer: int) -> None:
        """What is told to the device from now on finds swapped blocks of a layer of the model where they belong."""
        if self._swaps is not None:
            self._swaps.await_layer(layer - self._attached[0].first_layer)

    def settle(self) -> None:
        """The same of all layers, before what does not go layer by layer: a replay, say."""
        if self._swaps is not None:
            self._swaps.settle()

    def _by_pool(self, blocks: Int32Array) -> Iterator[tuple[HostPool, NDArray[np.bool_], Int32Array]]:
        """(pool, which of the blocks lie there, their numbers in it)"""
        for pool, first in zip(self.pools, self.first_blocks, strict=True):
            if pool:
                there = (blocks >= first) & (blocks < first + pool.num_blocks)
                yield pool, there, blocks[there] - first

    @property
    def is_alive(self) -> bool:
        """Whether all services that were attached live."""
        return all(pool.is_alive for pool in self._attached)

    def close(self) -> None:
        """Gives all pools up."""
        for pool in self._attached:
            pool.close()


def _layered_swaps(pools: Sequence[HostPool]) -> LayeredSwaps | None:
    """Where the device addresses all of them by itself."""
    sides = [pool.on_device for pool in pools if pool.on_device and pool.on_device.blocks]
    if not sides or len(sides) < len(pools):
        return None
    return LayeredSwaps(sides[0].make_queue(), sides[0].make_queue())


def _on_device(moves: Sequence[tuple[HostPool, BlockMoves]]) -> list[Move]:
    return [
        (pool.on_device.blocks, part) for pool, part in moves if pool.on_device and pool.on_device.blocks is not None
    ]


def answer_timeout_s(plane: TensorPlane) -> float:
    """How long an answer may take."""
    return _LAYERS_TIMEOUT_S if len(plane.lower) else _TIMEOUT_S
