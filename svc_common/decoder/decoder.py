"""What the pipeline asks of a decoder's linear part: everything of a layer but attention, embedding and head.

Stateless between calls: what a sequence has seen lies in the KV cache, which is not here.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from svc_common.decoder.rope import Rotation
from svc_common.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Workspace:
    """What one sub-batch needs in every layer; made once per iteration."""

    rotations: tuple[Rotation, ...]  # by kind of layer
    qkv: Tensor  # [n, num_q_heads + 2 * num_kv_heads, head_dim], written by pre_attention
    q: Tensor  # [n, num_q_heads, head_dim], a view of qkv
    kv: Tensor  # [n, 2, num_kv_heads, head_dim], a view of qkv: K and V stay together as in the KV cache

    @classmethod
    def make(cls, spec: ModelSpec, num_tokens: int, rotations: tuple[Rotation, ...], dtype: torch.dtype) -> "Workspace":
        num_heads = spec.num_q_heads + 2 * spec.num_kv_heads
        qkv = torch.empty((num_tokens, num_heads, spec.head_dim), dtype=dtype, device=rotations[0].cos.device)
        kv = qkv[:, spec.num_q_heads :].view(-1, 2, spec.num_kv_heads, spec.head_dim)
        return cls(rotations, qkv, qkv[:, : spec.num_q_heads], kv)


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """Of weights that are brought to the device while it computes, since the decoder was made."""

    num_bytes: int = 0
    wait_ns: int = 0
    """Spent in `await_layer`."""


class Decoder(Protocol):
    """One model on one device."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    """Of activations: hidden states, q, k, v and what attention makes of them."""
    weight_dtype: torch.dtype
    """Of the weight matrices."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on the device."""
        ...

    @property
    def traffic(self) -> WeightTraffic: ...

    def begin(self, layers: Iterable[int]) -> None:
        """Says which layers an iteration will compute, in the order in which they are first needed."""
        ...

    def await_layer(self, layer: int) -> bool:
        """Until the layer's weights are on the device; False where they always are.

        Precedes each pre_attention; post_attention lets them go.
        """
        ...

    def measuring(self) -> AbstractContextManager[None]:
        """Within it layers are computed without being awaited, as fast as if all lay on the device."""
        ...

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Both [n], int64 -> [n, hidden_size]."""
        ...

    def workspace(self, positions: Tensor) -> Workspace:
        """Of a sub-batch whose tokens have positions [n], int64."""
        ...

    def pre_attention(self, layer: int, hidden: Tensor, workspace: Workspace) -> None:
        """hidden [n, hidden_size] -> q, k and v, rotated, in the workspace."""
        ...

    def post_attention(self, layer: int, attention: Tensor, hidden: Tensor) -> Tensor:
        """attention [n, num_q_heads, head_dim], hidden [n, hidden_size] -> hidden after the layer.

        Takes `hidden` over: it may be overwritten and returned.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size], fp32. Valid until the next call."""
        ...


class AllResident:
    """What a decoder does whose weights all lie on the device."""

    traffic = WeightTraffic()

    def begin(self, layers: Iterable[int]) -> None:
        """Nothing has to come."""

    def await_layer(self, layer: int) -> bool:
        return False

    def measuring(self) -> AbstractContextManager[None]:
        return nullcontext()


def cap_logits_(logits: Tensor, spec: ModelSpec) -> Tensor:
    """In place: c * tanh(x / c), where the model caps its logits."""
    if not spec.logit_softcap:
        return logits
    return logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
