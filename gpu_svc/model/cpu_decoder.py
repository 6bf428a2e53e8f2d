"""A decoder's linear part on the CPU: one native call on each side of attention, weights packed once at load."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.dtypes import dtype_name
from gpu_svc.model.decoder import Workspace
from gpu_svc.model.rope import Rotary
from gpu_svc.model.torch_decoder import LayerWeights
from gpu_svc.threads import cpu_threads
from svc_common.cpu_kernels import DecoderLinear
from svc_common.model.spec import ModelSpec


class CpuDecoder:
    """A `Decoder`. Activations are fp32 whatever the weights' type: processors add up in fp32 anyway."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        spec: ModelSpec,
        weight_dtype: torch.dtype,
        embedding: Tensor,
        layers: Iterable[LayerWeights],
        final_norm: Tensor,
        head: Tensor | None,
        instruction_set: str = "auto",
    ) -> None:
        """Copies the weights, all fp32, into panels of `weight_dtype`, layer by layer; see DecoderWeights for shapes.

        `head` is None where it is the embedding. `instruction_set` forces one of runnable_linear_instruction_sets().
        """
        self.spec = spec
        self.weight_dtype = weight_dtype
        self._rotary = Rotary(spec.rope, self.device)
        self._logits = torch.empty((0, spec.vocab_size))  # grows to the largest batch seen
        self._native = DecoderLinear(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rope.rotary_dim,
            norm_eps=spec.rms_norm_eps,
            dtype=dtype_name(weight_dtype),
            threads=cpu_threads(),
            instruction_set=instruction_set,
        )
        self._native.set_vocabulary(embedding.numpy(), _array(head), final_norm.numpy())
        for layer in layers:
            self._add_layer(layer)

    def _add_layer(self, layer: LayerWeights) -> None:
        self._native.add_layer(
            attention_norm=layer.attention_norm.numpy(),
            qkv=layer.qkv.numpy(),
            qkv_bias=_array(layer.qkv_bias),
            q_norm=_array(layer.q_norm),
            k_norm=_array(layer.k_norm),
            output=layer.output.numpy(),
            output_bias=_array(layer.output_bias),
            mlp_norm=layer.mlp_norm.numpy(),
            gate_up=layer.gate_up.numpy(),
            gate_up_bias=_array(layer.gate_up_bias),
            down=layer.down.numpy(),
            down_bias=_array(layer.down_bias),
        )

    @property
    def weight_bytes(self) -> int:
        return self._native.num_bytes

    def embed(self, token_ids: Tensor) -> Tensor:
        hidden = torch.empty((len(token_ids), self.spec.hidden_size))
        assert token_ids.dtype == torch.int64
        assert token_ids.is_contiguous()
        self._native.embed(token_ids.data_ptr(), len(token_ids), hidden.data_ptr())
        return hidden

    def workspace(self, positions: Tensor) -> Workspace:
        cos, sin = self._rotary.cos_sin(positions, self.dtype)
        return Workspace.make(self.spec, cos.contiguous(), sin.contiguous())

    def pre_attention(self, layer: int, hidden: Tensor, workspace: Workspace) -> None:
        cos, sin, qkv = workspace.cos.data_ptr(), workspace.sin.data_ptr(), workspace.qkv.data_ptr()
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
        return logits


def _address(rows: Tensor) -> int:
    """Of dense fp32 rows, which is all that the native code reads."""
    assert rows.dtype == torch.float32
    assert rows.is_contiguous()
    return rows.data_ptr()


def _array(tensor: Tensor | None) -> NDArray[np.float32] | None:
    return None if tensor is None else tensor.numpy()
