"""A decoder's linear part in torch's own operations: on a GPU, and to check the CPU's against."""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from svc_common.decoder.decoder import AllResident, Workspace, cap_logits_
from svc_common.decoder.ops import DecoderOps, TorchOps
from svc_common.decoder.rope import Rotaries
from svc_common.decoder.weights import DecoderWeights, ExpertsWeights, LayerWeights, MlpWeights, NormWeights
from svc_common.model.spec import ModelSpec


class TorchDecoder(AllResident):
    """A `Decoder`."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, ops: DecoderOps | None = None) -> None:
        """`weights` may lack all layers: they are then bound later. `ops`: torch's own where it is None."""
        self.spec = spec
        self._ops = ops or TorchOps()
        self._layers: list[LayerWeights | None] = [*weights.layers] or [None] * spec.num_layers
        self._others = replace(weights, layers=())
        self.dtype = self.weight_dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._rotaries = Rotaries(spec, self.device)

    @property
    def weights(self) -> DecoderWeights:
        """All that it is bound to."""
        return replace(self._others, layers=tuple(layer for layer in self._layers if layer is not None))

    @property
    def weight_bytes(self) -> int:
        return self.weights.num_bytes

    def bind_layer(self, index: int, layer: LayerWeights | None) -> None:
        """Computes the layer with these weights; None: gives up what it was bound to."""
        self._layers[index] = layer

    def is_bound(self, index: int) -> bool:
        return self._layers[index] is not None

    def _layer(self, index: int) -> LayerWeights:
        layer = self._layers[index]
        if layer is None:
            raise RuntimeError(f"layer {index} has no weights here")
        return layer

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = F.embedding(token_ids, self._others.embedding)
        if self.spec.embedding_scale != 1.0:
            hidden.mul_(self.spec.embedding_scale)
        if self._others.positions is not None and self.spec.learned_positions is not None:
            hidden.add_(F.embedding(positions + self.spec.learned_positions, self._others.positions))
        return hidden

    def workspace(self, positions: Tensor) -> Workspace:
        return Workspace.make(self.spec, len(positions), self._rotaries.rotations(positions, self.dtype), self.dtype)

    def pre_attention(self, layer: int, hidden: Tensor, workspace: Workspace) -> None:
        spec, weights = self.spec, self._layer(layer)
        normed = self._normed(hidden, weights.attention_norm)
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
                view.copy_(self._ops.rms_norm(view, weight, spec.norm_eps))
        if spec.rope is not None:
            rotation = workspace.rotations[self._rotaries.of_layer[layer]]
            self._ops.rotate_(heads[:, :num_rotated], rotation.cos, rotation.sin)

    def post_attention(self, layer: int, attention: Tensor, hidden: Tensor) -> Tensor:
        weights = self._layer(layer)
        added = F.linear(attention.flatten(1), weights.output, weights.output_bias)
        hidden, normed = self._added(hidden, added, weights)
        if isinstance(weights.mlp, ExpertsWeights):
            added = self._experts(weights.mlp, normed)
        else:
            added = self._mlp(weights.mlp, normed)
        return self._post_normed(added, weights.post_mlp_norm).add_(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(self._normed(hidden, self._others.final_norm), self._others.head)
        return cap_logits_(logits.to(torch.float32), self.spec)

    def _normed(self, hidden: Tensor, norm: NormWeights) -> Tensor:
        shape, eps = (self.spec.hidden_size,), self.spec.norm_eps
        if norm.bias is not None:
            return F.layer_norm(hidden, shape, norm.weight, norm.bias, eps)
        return self._ops.rms_norm(hidden, norm.weight, eps)

    def _post_normed(self, added: Tensor, weight: Tensor | None) -> Tensor:
        return added if weight is None else self._ops.rms_norm(added, weight, self.spec.norm_eps)

    def _added(self, hidden: Tensor, attended: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor]:
        """Hidden states after attention, in the memory of `attended`, and their norm."""
        attended = self._post_normed(attended, weights.post_attention_norm)
        norm = weights.mlp_norm
        if norm.bias is not None:
            return attended.add_(hidden), self._normed(attended, norm)
        return attended, self._ops.add_rms_norm_(attended, hidden, norm.weight, self.spec.norm_eps)

    def _mlp(self, mlp: MlpWeights, rows: Tensor) -> Tensor:
        inner = F.linear(rows, mlp.up, mlp.up_bias)
        match self.spec.activation:
            case "relu":
                inner = inner.relu_()
            case "silu_gated":
                inner = self._ops.silu_gate(inner)
            case "gelu_tanh_gated":
                gate, up = inner.chunk(2, dim=-1)
                inner = F.gelu(gate, approximate="tanh").mul_(up)
        return F.linear(inner, mlp.down, mlp.down_bias)

    def _experts(self, experts: ExpertsWeights, rows: Tensor) -> Tensor:
        """Expert after expert, so that a token's sum has one order whatever its neighbours."""
        spec = self.spec.experts
        assert spec is not None
        shares = F.linear(rows.to(torch.float32), experts.router).softmax(-1)  # [n, num_experts]
        weights, chosen = shares.topk(spec.experts_per_token)
        if spec.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        added = torch.zeros_like(rows)
        for expert in sorted(set(chosen.flatten().tolist())):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            part = self._mlp(experts.mlps[expert], rows[row])
            added.index_add_(0, row, part * weights[row, place, None].to(part.dtype))
        if experts.shared is not None and experts.shared_gate is not None:
            gate = (rows.to(torch.float32) @ experts.shared_gate).sigmoid().to(rows.dtype)
            added.add_(self._mlp(experts.shared, rows).mul_(gate[:, None]))
        return added
