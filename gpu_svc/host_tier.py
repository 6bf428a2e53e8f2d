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

from gpu_svc.kv_cache import KvPlaces, write_kv
from gpu_svc.kv_layout import KvBlocks
from gpu_svc.kv_swap import BlockMoves, copy_blocks
from gpu_svc.limits import Int32Array
from svc_common.tensor_plane import CpuSubBatch, Report, TensorPlane

# Far longer than the CPU attends for in one layer; the service's death is noticed long before.
_TIMEOUT_S = 5.0


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

    def __init__(self, plane: TensorPlane, num_threads: int) -> None:
        self._plane = plane
        self._number = 0
        self.num_threads = num_threads
        self.num_blocks = plane.num_blocks
        scales = None if plane.scales is None else torch.from_numpy(plane.scales)
        self.blocks = KvBlocks(_as_tensor(plane.pool), scales)
        """The shared pool, all layers."""
        self._exchange = [
            tuple(map(_as_tensor, (plane.q(slot), plane.k(slot), plane.v(slot), plane.out(slot)))) for slot in range(2)
        ]
        self._finish_ns = 0
        self._announced_blocks = 0

    @property
    def wait_ns(self) -> int:
        """Spent in `wait` and `finish` so far."""
        return self._plane.wait_ns + self._finish_ns

    def begin(
        self, work: Sequence[CpuWork], num_blocks_used: int, trace: bool = False, layers: range | None = None
    ) -> None:
        """Describes an iteration: its CPU decodes in the order in which each of `layers`, or of all, submits them.

        Without any it says at most how many blocks are in use.
        """
        if not work and num_blocks_used == self._announced_blocks:
            return
        self._announced_blocks = num_blocks_used
        self._number += 1
        sub_batches = [CpuSubBatch(part.slot, part.context_tokens, part.block_tables) for part in work]
        self._plane.begin(self._number, sub_batches, num_blocks_used, trace, layers)

    def submit(self, slot: int, q: Tensor, kv: Tensor, rows: slice) -> None:
        """Hands over rows of q [n, num_q_heads, head_dim] and kv [n, 2, num_kv_heads, head_dim]: the slot's next layer.

        Copies from a GPU end only when the data is there, so the doorbell rings after it.
        """
        num = rows.stop - rows.start
        if q.is_cpu:
            self._plane.submit_rows(slot, q, kv, rows.start, num)
            return
        to_q, to_k, to_v, _ = self._exchange[slot]
        to_q[:num].copy_(q[rows])
        to_k[:num].copy_(kv[rows, 0])
        to_v[:num].copy_(kv[rows, 1])
        self._plane.submit(slot)

    def wait(self, slot: int, out: Tensor, rows: slice) -> None:
        """Writes the attention of this slot's last submit to rows of out [n, num_q_heads, head_dim]."""
        num = rows.stop - rows.start
        if out.is_cpu:
            self._plane.wait_rows(slot, out, rows.start, num, _TIMEOUT_S)
            return
        self._plane.wait(slot, _TIMEOUT_S)
        out[rows].copy_(self._exchange[slot][3][:num])

    def finish(self) -> Report:
        """Ends an iteration that had CPU decodes."""
        start = time.perf_counter_ns()
        report = self._plane.finish(_TIMEOUT_S)
        self._finish_ns += time.perf_counter_ns() - start
        return report

    def write(self, layer: int, places: KvPlaces, kv: Tensor) -> None:
        """Stores a prefill chunk's kv [n, 2, num_kv_heads, head_dim]; `places` are the CPU's."""
        write_kv(self.blocks[layer], places, kv.cpu())

    @property
    def is_alive(self) -> bool:
        return self._plane.peer_alive()

    def close(self) -> None:
        """Gives the pool up; memory is unmapped once the last tensor on it is gone."""
        self._plane.close()
        self.blocks = KvBlocks(torch.empty(0))
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

    def pool(self, number: int) -> HostPool:
        """One that is attached."""
        pool = self.pools[number]
        assert pool is not None
        return pool

    @property
    def wait_ns(self) -> int:
        """Spent in `wait` and `finish` so far."""
        return sum([pool.wait_ns for pool in self._attached])

    def begin(
        self,
        work: Sequence[CpuWork],
        blocks_used: Sequence[int],
        trace: bool = False,
        layers: range | None = None,
    ) -> None:
        """Describes an iteration to all services; `work` as for HostPool, `blocks_used` by pool."""
        for number, pool in enumerate(self.pools):
            if pool:
                pool.begin([part for part in work if part.pool == number], blocks_used[number], trace, layers)

    def submit(self, work: Sequence[CpuWork], q: Tensor, kv: Tensor) -> None:
        """Hands one sub-batch's rows of q [n, num_q_heads, head_dim] and kv [n, 2, num_kv_heads, head_dim] over."""
        for part in work:
            self.pool(part.pool).submit(part.slot, q, kv, part.rows)

    def wait(self, work: Sequence[CpuWork], out: Tensor) -> None:
        """Writes the attention of what was submitted last to rows of out [n, num_q_heads, head_dim]."""
        for part in work:
            self.pool(part.pool).wait(part.slot, out, part.rows)

    def finish(self, work: Sequence[CpuWork]) -> dict[int, Report]:
        """Ends an iteration that had such work; reports by pool."""
        return {number: self.pool(number).finish() for number in sorted({part.pool for part in work})}

    def swap_out(self, gpu: KvBlocks, moves: BlockMoves, head_dim: int) -> None:
        """Copies blocks of the GPU to the host; done when it returns."""
        for pool, part, blocks in self._by_pool(moves.target):
            copy_blocks(gpu, pool.blocks, BlockMoves(moves.source[part], blocks, moves.num_tokens[part]), head_dim)

    def swap_in(self, gpu: KvBlocks, moves: BlockMoves, head_dim: int) -> None:
        """The other way."""
        for pool, part, blocks in self._by_pool(moves.source):
            copy_blocks(pool.blocks, gpu, BlockMoves(blocks, moves.target[part], moves.num_tokens[part]), head_dim)

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


def _as_tensor(array: NDArray[np.generic]) -> Tensor:
    """A view; numpy has no bf16 and shows its bits as uint16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
