"""A decoder's linear part in torch's own operations: on a GPU, and to check the CPU's against."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gpu_svc.model.decoder import Workspace
from gpu_svc.model.rope import Rotary, rotate_
from svc_common.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, in the compute type. Matrices are [out, in]; what is read together is kept together."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]: q, k, v
    qkv_bias: Tensor | None  # [(num_q_heads + 2 * num_kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden_size, num_q_heads * head_dim]
    output_bias: Tensor | None  # [hidden_size]
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]: gate, up
    gate_up_bias: Tensor | None  # [2 * intermediate_size]
    down: Tensor  # [hidden_size, intermediate_size]
    down_bias: Tensor | None  # [hidden_size]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The whole model. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Tensor  # [vocab_size, hidden_size]

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device; a tied head counts once."""
        tensors = {id(tensor): tensor for tensor in (self.embedding, self.final_norm, self.head)}
        for layer in self.layers:
            for name in LayerWeights.__dataclass_fields__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[id(tensor)] = tensor
        return sum(tensor.nbytes for tensor in tensors.values())


class TorchDecoder:
    """A `Decoder`."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = self.weight_dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._rotary = Rotary(spec.rope, self.device)

    @property
    def weight_bytes(self) -> int:
        return self.weights.num_bytes

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weights.embedding)

    def workspace(self, positions: Tensor) -> Workspace:
        return Workspace.make(self.spec, *self._rotary.cos_sin(positions, self.dtype))

    def pre_attention(self, layer: int, hidden: Tensor, workspace: Workspace) -> None:
        spec, weights = self.spec, self.weights.layers[layer]
        normed = F.rms_norm(hidden, (spec.hidden_size,), weights.attention_norm, spec.rms_norm_eps)
        heads, qkv = workspace.qkv, workspace.qkv.flatten(1)
        if weights.qkv_bias is None:
            torch.mm(normed, weights.qkv.t(), out=qkv)
        else:
            torch.addmm(weights.qkv_bias, normed, weights.qkv.t(), out=qkv)
        num_rotated = spec.num_q_heads + spec.num_kv_heads
        if weights.q_norm is not None and weights.k_norm is not None:
            for view, weight in (
                (workspace.q, weights.q_norm),
                (heads[:, spec.num_q_heads : num_rotated], weights.k_norm),
            ):
                view.copy_(F.rms_norm(view, (spec.head_dim,), weight, spec.rms_norm_eps))
        rotate_(heads[:, :num_rotated], workspace.cos, workspace.sin)

    def post_attention(self, layer: int, attention: Tensor, hidden: Tensor) -> Tensor:
        spec, weights = self.spec, self.weights.layers[layer]
        hidden = F.linear(attention.flatten(1), weights.output, weights.output_bias).add_(hidden)
        normed = F.rms_norm(hidden, (spec.hidden_size,), weights.mlp_norm, spec.rms_norm_eps)
        gate, up = F.linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), weights.down, weights.down_bias).add_(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, (self.spec.hidden_size,), self.weights.final_norm, self.spec.rms_norm_eps)
        return F.linear(normed, self.weights.head).to(torch.float32)
