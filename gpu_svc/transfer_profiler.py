"""Measures what crosses between device and host, KV that is swapped and streamed weights; under the profiler."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from gpu_svc.kv_layout import KvBlocks
from gpu_svc.kv_swap import BlockMoves, copy_blocks
from gpu_svc.link import Link
from gpu_svc.lower_pool import LowerTables
from gpu_svc.stopwatch import Stopwatch
from svc_common.decoder.decoder import Decoder
from svc_common.policy import ExecutionPolicy

_SWAP_BYTES = 16 * 2**20
_LINK_BYTES = 64 * 2**20
_LINK_S = 0.05
"""Of crossing an emulated link, at most."""

logger = logging.getLogger(__name__)


def swap_bytes_per_s(
    host: HostTier | None, cache: GpuKvCache, link: Link, policy: ExecutionPolicy, decoder: Decoder
) -> float:
    """Of blocks that go to the first attached pool and come back, in the host's bytes; 0 without a second tier."""
    pool = next((pool for pool in host.pools if pool), None) if host else None
    if host is None or pool is None or not cache.num_blocks:
        return 0.0
    shape, num_layers = cache.shape, decoder.spec.num_layers
    # All layers of a block move, those in the lower pool within host memory.
    block_bytes = replace(shape, num_layers=num_layers).host_block_bytes
    num_blocks = min(cache.num_blocks, pool.num_blocks, max(1, _SWAP_BYTES // block_bytes))
    blocks = np.arange(num_blocks, dtype=np.int32)
    moves = BlockMoves(blocks, blocks, np.full(num_blocks, shape.block_tokens, np.int32))
    on_host = blocks + np.int32(host.first_blocks[host.pools.index(pool)])
    out, back = replace(moves, target=on_host), replace(moves, source=on_host)
    none = BlockMoves(*[np.zeros(0, np.int32)] * 3)
    gpu, lower, tables = KvBlocks(cache.blocks), pool.lower, LowerTables(cache.num_blocks)

    def there_and_back() -> None:
        if policy.decode_cpu_layers:
            copy_blocks(lower, lower, tables.to_host(moves), shape.head_dim)
            copy_blocks(lower, lower, tables.to_gpu(moves), shape.head_dim)
        if policy.decode_cpu_layers < num_layers:
            host.swap(link, gpu, out, none, shape)
            host.swap(link, gpu, none, back, shape)
            host.settle()

    return 2 * num_blocks * block_bytes / Stopwatch(decoder.device).least_s(there_and_back)


def link_bytes_per_s(link: Link, device: torch.device) -> float:
    """To the device, as weights cross it."""
    if device.type == "cuda":
        from gpu_svc.cuda.link import measure_link

        rates = measure_link(device, _LINK_BYTES)
        logger.info("link: %s", rates)
        return rates.to_device
    lane = link.to_device
    num_bytes = min(_LINK_BYTES, round(lane.bytes_per_s * _LINK_S) or _LINK_BYTES)
    source, target = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    cross_once = partial(lane.carry, num_bytes, lambda piece: target[piece].copy_(source[piece]))
    return num_bytes / Stopwatch(device).least_s(cross_once)
