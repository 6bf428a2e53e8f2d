"""A region's memory as torch's tensors, without copies."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.kv_layout import KvBlocks
from svc_common.tensor_plane import TensorPlane


def pool_of(plane: TensorPlane) -> KvBlocks:
    """The shared pool: all layers but those that the CPU computes."""
    return _as_blocks(plane.pool, plane.scales)


def lower_pool_of(plane: TensorPlane) -> KvBlocks:
    """Those layers, for both tiers."""
    return _as_blocks(plane.lower, plane.lower_scales)


def exchange_of(plane: TensorPlane, slot: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and out: [max_sequences, heads, head_dim]."""
    q, k, v, out = map(_as_tensor, (plane.q(slot), plane.k(slot), plane.v(slot), plane.out(slot)))
    return q, k, v, out


def _as_blocks(pool: NDArray[np.generic], scales: NDArray[np.generic] | None) -> KvBlocks:
    return KvBlocks(_as_tensor(pool), None if scales is None else torch.from_numpy(scales))


def _as_tensor(array: NDArray[np.generic]) -> Tensor:
    """numpy has no bf16 and shows its bits as uint16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
