"""Makes the decoder of a device from a checkpoint: checks each tensor, casts it, fuses what is read together."""

import torch
from torch import Tensor

from gpu_svc.model.checkpoint import Checkpoint, CheckpointError
from gpu_svc.model.cpu_decoder import CpuDecoder
from gpu_svc.model.decoder import Decoder
from gpu_svc.model.torch_decoder import DecoderWeights, LayerWeights, TorchDecoder
from svc_common.model.spec import ModelSpec


def load_decoder(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The decoder that `device` computes fastest with, its weights in `dtype`.

    Peak memory is the weights, and beside them one tensor of the file or, on the CPU, one layer in fp32. Raises
    CheckpointError.
    """
    if device.type != "cpu":
        return TorchDecoder(spec, load_weights(checkpoint, spec, dtype, device))
    loader = _Loader(checkpoint, torch.float32, device)
    return CpuDecoder(
        spec,
        dtype,
        embedding=_load_embedding(loader, spec),
        layers=(_load_layer(loader, spec, layer) for layer in range(spec.num_layers)),
        final_norm=_load_final_norm(loader, spec),
        head=None if spec.tie_embeddings else _load_head(loader, spec),
    )


def load_weights(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Peak memory is the weights themselves and one tensor of the file. Raises CheckpointError."""
    loader = _Loader(checkpoint, dtype, device)
    embedding = _load_embedding(loader, spec)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layer(loader, spec, layer) for layer in range(spec.num_layers)),
        final_norm=_load_final_norm(loader, spec),
        head=embedding if spec.tie_embeddings else _load_head(loader, spec),
    )


def _load_embedding(loader: "_Loader", spec: ModelSpec) -> Tensor:
    return loader.fused([("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))])


def _load_head(loader: "_Loader", spec: ModelSpec) -> Tensor:
    return loader.fused([("lm_head.weight", (spec.vocab_size, spec.hidden_size))])


def _load_final_norm(loader: "_Loader", spec: ModelSpec) -> Tensor:
    return loader.fused([("model.norm.weight", (spec.hidden_size,))])


def _load_layer(loader: "_Loader", spec: ModelSpec, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = [(f"{attention}.q_proj", q_size), (f"{attention}.k_proj", kv_size), (f"{attention}.v_proj", kv_size)]
    gate_up = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
    output, down = [(f"{attention}.o_proj", hidden)], [(f"{mlp}.down_proj", hidden)]

    def matrix(parts: list[tuple[str, int]], width: int) -> Tensor:
        return loader.fused([(f"{name}.weight", (rows, width)) for name, rows in parts])

    def bias(parts: list[tuple[str, int]], present: bool) -> Tensor | None:
        return loader.fused([(f"{name}.bias", (rows,)) for name, rows in parts]) if present else None

    def norm(name: str, size: int) -> Tensor:
        return loader.fused([(f"{name}.weight", (size,))])

    return LayerWeights(
        attention_norm=norm(f"{prefix}.input_layernorm", hidden),
        qkv=matrix(qkv, hidden),
        qkv_bias=bias(qkv, spec.qkv_bias),
        q_norm=norm(f"{attention}.q_norm", spec.head_dim) if spec.qk_norm else None,
        k_norm=norm(f"{attention}.k_norm", spec.head_dim) if spec.qk_norm else None,
        output=matrix(output, q_size),
        output_bias=bias(output, spec.output_bias),
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", hidden),
        gate_up=matrix(gate_up, hidden),
        gate_up_bias=bias(gate_up, spec.mlp_bias),
        down=matrix(down, inner),
        down_bias=bias(down, spec.mlp_bias),
    )


class _Loader:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def fused(self, parts: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Named tensors of the given shapes, stacked along their rows, on the device in the compute type."""
        rows = sum(shape[0] for _, shape in parts)
        target = torch.empty((rows, *parts[0][1][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in parts:
            if name not in self._checkpoint:
                raise CheckpointError(f"the checkpoint lacks {name}")
            tensor = self._checkpoint.read(name)
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"{name} has shape {list(tensor.shape)}, the model wants {list(shape)}")
            target[start : start + shape[0]].copy_(tensor)
            start += shape[0]
        return target
