"""Where KV of the CPU layers lies: blocks of the lower pool, and how many there are of each tier.

Each block of either tier has its counterpart in the lower pool, so a sequence's table there follows from its own:
GPU block g is g, host block h is num_gpu_blocks + h. No allocator knows of it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_svc.kv_cache import KvShape
from gpu_svc.kv_swap import BlockMoves
from svc_common.plan import Tier


@dataclass(frozen=True, slots=True)
class LowerTables:
    num_gpu_blocks: int

    def of(self, tables: NDArray[np.int32], tiers: NDArray[np.int8]) -> NDArray[np.int32]:
        """[n, stride] in the lower pool, of tables [n, stride] of sequences on `tiers` [n]."""
        offsets = np.where(tiers == Tier.HOST.value, self.num_gpu_blocks, 0).astype(np.int32)
        return np.ascontiguousarray(tables + offsets[:, None])

    def to_host(self, moves: BlockMoves) -> BlockMoves:
        """Within the lower pool, what moves from the GPU's blocks to the host's."""
        return BlockMoves(moves.source, moves.target + np.int32(self.num_gpu_blocks), moves.num_tokens)

    def to_gpu(self, moves: BlockMoves) -> BlockMoves:
        """The reverse."""
        return BlockMoves(moves.source + np.int32(self.num_gpu_blocks), moves.target, moves.num_tokens)


def num_gpu_blocks(shape: KvShape, gpu_bytes: int, host_bytes: int, cpu_layers: int) -> int:
    """Blocks of the GPU's tier; `shape` is of all layers.

    Without CPU layers, as many as fit into gpu_bytes. With such, a block takes fewer bytes there, none where all layers
    are the CPU's, and its lower part takes host memory: of host_bytes those parts may take as large a share as the GPU
    would hold of all tokens without CPU layers.
    """
    without = gpu_bytes // shape.block_bytes
    if cpu_layers == 0 or without == 0:
        return without
    on_host = host_bytes // shape.host_block_bytes
    lower_bytes = shape.host_block_bytes * cpu_layers // shape.num_layers
    within_share = host_bytes * without // (without + on_host) // lower_bytes
    upper_bytes = shape.above(cpu_layers).block_bytes
    return min(within_share, gpu_bytes // upper_bytes) if upper_bytes else within_share
