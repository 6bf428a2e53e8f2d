"""The small operations between a decoder's matrix products, in torch; `TorchDecoder` can be given others."""

from typing import Protocol

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from svc_common.decoder.rope import rotate_


class DecoderOps(Protocol):
    """Rows and heads are in the compute type; only their last dimension need be contiguous."""

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rows [..., size], weight [size]."""
        ...

    def add_rms_norm_(self, hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of `hidden` [n, size] after `added` [n, size] was added to it in place."""
        ...

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotates heads [n, num_heads, head_dim] in place by cos and sin [n, 1, rotary_dim / 2]."""
        ...

    def silu_gate(self, inner: Tensor) -> Tensor:
        """silu(gate) * up of inner [n, 2 * size], gates first."""
        ...


class TorchOps:
    """`DecoderOps`."""

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(rows, weight.shape, weight, eps)

    def add_rms_norm_(self, hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(hidden.add_(added), weight.shape, weight, eps)

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        rotate_(heads, cos, sin)

    def silu_gate(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
