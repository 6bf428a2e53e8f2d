"""A decoder's linear part on the CPU: one native call on each side of attention, weights packed once at load."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from svc_common.cpu_kernels import DecoderLinear, ThreadPool
from svc_common.decoder.decoder import Workspace, cap_logits_
from svc_common.decoder.dtypes import dtype_name
from svc_common.decoder.rope import Rotaries
from svc_common.decoder.threads import cpu_threads
from svc_common.decoder.weights import ExpertsWeights, LayerWeights, MlpWeights, NormWeights
from svc_common.model.spec import ModelSpec


class CpuDecoder:
    """A `Decoder`. Activations are fp32 whatever the weights' type: processors add up in fp32 anyway."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        spec: ModelSpec,
        weight_dtype: torch.dtype,
        embedding: Tensor | None,
        layers: Iterable[LayerWeights],
        final_norm: NormWeights | None,
        head: Tensor | None,
        positions: Tensor | None = None,
        instruction_set: str = "auto",
        threads: ThreadPool | None = None,
    ) -> None:
        """Copies the weights, all fp32, into panels of `weight_dtype`, layer by layer; see DecoderWeights for shapes.

        `head` is None where it is the embedding. Without embedding and norm it only takes hidden states through layers.
        It computes on `threads`, or on this process's own.
        `instruction_set` forces one of runnable_linear_instruction_sets().
        """
        self.spec = spec
        self.weight_dtype = weight_dtype
        self._rotaries = Rotaries(spec, self.device)
        self._positions = positions
        self._logits = torch.empty((0, spec.vocab_size))  # grows to the largest batch seen
        self._native = DecoderLinear(
            hidden_size=spec.hidden_size,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rope.rotary_dim if spec.rope else 0,
            norm_eps=spec.norm_eps,
            activation=spec.activation,
            dtype=dtype_name(weight_dtype),
            threads=threads or cpu_threads(),
            instruction_set=instruction_set,
        )
        if embedding is not None and final_norm is not None:
            self._native.set_vocabulary(
                embedding.numpy(), _array(head), final_norm.weight.numpy(), _array(final_norm.bias)
            )
        for layer in layers:
            self._add_layer(layer)

    def _add_layer(self, layer: LayerWeights) -> None:
        self._native.add_layer(
            attention_norm=layer.attention_norm.weight.numpy(),
            attention_norm_bias=_array(layer.attention_norm.bias),
            qkv=layer.qkv.numpy(),
            qkv_bias=_array(layer.qkv_bias),
            q_norm=_array(layer.q_norm),
            k_norm=_array(layer.k_norm),
            output=layer.output.numpy(),
            output_bias=_array(layer.output_bias),
            post_attention_norm=_array(layer.post_attention_norm),
            mlp_norm=layer.mlp_norm.weight.numpy(),
            mlp_norm_bias=_array(layer.mlp_norm.bias),
            post_mlp_norm=_array(layer.post_mlp_norm),
        )
        if isinstance(layer.mlp, MlpWeights):
            mlp = layer.mlp
            self._native.set_mlp(
                up=mlp.up.numpy(), up_bias=_array(mlp.up_bias), down=mlp.down.numpy(), down_bias=_array(mlp.down_bias)
            )
        else:
            self._add_experts(layer.mlp)

    def _add_experts(self, experts: ExpertsWeights) -> None:
        assert self.spec.experts is not None
        self._native.set_router(
            experts.router.numpy(), self.spec.experts.experts_per_token, self.spec.experts.normalised
        )
        for mlp in experts.mlps:
            self._native.add_expert(mlp.up.numpy(), mlp.down.numpy())
        if experts.shared is not None and experts.shared_gate is not None:
            shared = experts.shared
            self._native.set_shared_expert(shared.up.numpy(), shared.down.numpy(), experts.shared_gate.numpy())

    @property
    def native(self) -> DecoderLinear:
        """What computes, for native code that takes a batch through layers by itself."""
        return self._native

    @property
    def weight_bytes(self) -> int:
        return self._native.num_bytes + (0 if self._positions is None else self._positions.nbytes)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = torch.empty((len(token_ids), self.spec.hidden_size))
        assert token_ids.dtype == torch.int64
        assert token_ids.is_contiguous()
        self._native.embed(token_ids.data_ptr(), len(token_ids), hidden.data_ptr())
        if self.spec.embedding_scale != 1.0:
            hidden.mul_(self.spec.embedding_scale)
        if self._positions is not None and self.spec.learned_positions is not None:
            hidden.add_(self._positions[positions + self.spec.learned_positions])
        return hidden

    def workspace(self, positions: Tensor) -> Workspace:
        return Workspace.make(self.spec, len(positions), self._rotaries.rotations(positions, self.dtype), self.dtype)

    def pre_attention(self, layer: int, hidden: Tensor, workspace: Workspace) -> None:
        rotation = workspace.rotations[self._rotaries.of_layer[layer]]
        cos, sin, qkv = rotation.cos_address, rotation.sin_address, workspace.qkv.data_ptr()
        self._native.pre_attention(layer, _address(hidden), cos, sin, hidden.shape[0], qkv)

    def post_attention(self, layer: int, attention: Tensor, hidden: Tensor) -> Tensor:
        self._native.post_attention(layer, _address(attention), hidden.shape[0], _address(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        if num_rows > len(self._logits):
            self._logits = torch.empty((num_rows, self.spec.vocab_size))
        logits = self._logits[:num_rows]
        self._native.logits(_address(hidden), num_rows, _address(logits))
        return cap_logits_(logits, self.spec)


def _address(rows: Tensor) -> int:
    """Of dense fp32 rows, which is all that the native code reads."""
    assert rows.dtype == torch.float32
    assert rows.is_contiguous()
    return rows.data_ptr()


def _array(tensor: Tensor | None) -> NDArray[np.float32] | None:
    return None if tensor is None else tensor.numpy()
