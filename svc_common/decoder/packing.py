"""Turns a layer's weights, as models keep them, into the memory that the CPU computes with."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from svc_common.cpu_kernels import DecoderLinear
from svc_common.decoder.weights import ExpertsWeights, LayerWeights, NormWeights
from svc_common.model.spec import ModelSpec

Bytes = NDArray[np.uint8]
"""[n], contiguous, beginning at a multiple of 64 bytes."""


def declare_layers(native: DecoderLinear, spec: ModelSpec) -> None:
    """Tells it what each layer and the vocabulary consist of."""
    norm_biases = spec.norm == "layer"
    for layer in spec.layers:
        experts = layer.experts
        native.add_layer(
            norm_biases=norm_biases,
            qkv_bias=spec.qkv_bias,
            qk_norm=spec.qk_norm,
            output_bias=spec.output_bias,
            post_norms=spec.post_norms,
            mlp_bias=spec.mlp_bias and experts is None,
            inner_size=experts.intermediate_size if experts else spec.intermediate_size,
            num_experts=experts.num_experts if experts else 0,
            experts_per_token=experts.experts_per_token if experts else 0,
            normalised=experts.normalised if experts else False,
            shared_inner_size=experts.shared_intermediate_size if experts else 0,
        )
    native.set_vocabulary(spec.vocab_size, spec.tie_embeddings, norm_biases)


def pack_layer(native: DecoderLinear, index: int, layer: LayerWeights, memory: Bytes) -> None:
    """`layer` in fp32; `memory` zeroed, of native.layer_bytes(index)."""
    experts = layer.mlp if isinstance(layer.mlp, ExpertsWeights) else None
    mlps = (layer.mlp,) if not isinstance(layer.mlp, ExpertsWeights) else layer.mlp.mlps
    shared = experts.shared if experts else None
    native.pack_layer(
        index,
        memory,
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
        ups=[mlp.up.numpy() for mlp in mlps],
        downs=[mlp.down.numpy() for mlp in mlps],
        up_bias=_array(mlps[0].up_bias),
        down_bias=_array(mlps[0].down_bias),
        router=_array(experts.router if experts else None),
        shared_up=_array(shared.up if shared else None),
        shared_down=_array(shared.down if shared else None),
        shared_gate=_array(experts.shared_gate if experts else None),
    )


def pack_vocabulary(
    native: DecoderLinear, embedding: Tensor, head: Tensor | None, final_norm: NormWeights, memory: Bytes
) -> None:
    """All in fp32, `head` None where it is the embedding; `memory` zeroed, of native.vocabulary_bytes."""
    native.pack_vocabulary(
        memory,
        embedding=embedding.numpy(),
        head=_array(head),
        final_norm=final_norm.weight.numpy(),
        final_norm_bias=_array(final_norm.bias),
    )


def _array(tensor: Tensor | None) -> NDArray[np.float32] | None:
    return None if tensor is None else tensor.numpy()
