"""What each layer of a decoder asks for: FLOP, bytes of weights, bytes of KV."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from svc_common.model.spec import ModelSpec

_LOGIT_BYTES = 4
"""Logits are fp32."""
_HIDDEN_COPIES = 4
"""Tensors as wide as the hidden state that live at once in a layer: residual, its norm, attention's output, the sum."""


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer; layers that are alike are equal."""

    dense_parameters: int
    """Weights that every token meets."""
    dense_bytes: int
    expert_parameters: int
    """Of one expert; 0 where the layer has none."""
    expert_bytes: int
    num_experts: int
    experts_per_token: int
    kv_bytes_per_token: int
    pair_flop: int
    """Attention, for each pair of a query's token and one that it sees: q·k and weights·v, all heads."""
    window: int
    """Tokens that each query sees, itself included; 0: all."""

    @property
    def weight_bytes(self) -> int:
        """All experts included: what streaming moves."""
        return self.dense_bytes + self.num_experts * self.expert_bytes

    def experts_met(self, num_tokens: float) -> float:
        """Expected number of different experts that a batch goes to, if each token picks evenly at random."""
        if not self.num_experts:
            return 0.0
        missed: float = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)

    def seen_tokens(self, context_tokens: float) -> float:
        """By a decode of that context."""
        return min(context_tokens, self.window) if self.window else context_tokens

    def prompt_pairs(self, prompt_tokens: int) -> int:
        """Pairs of a token and one that it sees, in a whole prompt."""
        seen = min(prompt_tokens, self.window) if self.window else prompt_tokens
        return seen * (seen + 1) // 2 + (prompt_tokens - seen) * seen


@dataclass(frozen=True)
class DecoderFigures:
    """A model in one number type."""

    layers: tuple[LayerFigures, ...]
    hidden_bytes: int
    """Of one token's hidden state."""
    head_parameters: int
    head_bytes: int
    vocabulary_bytes: int
    """Embeddings, positions and head, which always lie on the GPU."""
    activation_bytes_per_token: int
    """What a layer holds at once for each token of its batch."""
    logit_bytes: int
    """Of one output."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def weight_sums(self) -> Sequence[int]:
        """Bytes of the first n layers' weights, for n from 0."""
        return tuple(accumulate((layer.weight_bytes for layer in self.layers), initial=0))

    @cached_property
    def kv_sums(self) -> Sequence[int]:
        """Bytes of one token's KV in the first n layers, for n from 0."""
        return tuple(accumulate((layer.kv_bytes_per_token for layer in self.layers), initial=0))


def decoder_figures(spec: ModelSpec, dtype_bytes: int, kv_dtype_bytes: int) -> DecoderFigures:
    """With weights and activations of one type, and KV of one."""
    widest = max(
        matrix.shape[-2] for layer in range(spec.num_layers) for matrix in spec.layer_matrices(layer) if matrix.shape
    )
    return DecoderFigures(
        layers=tuple(_layer(spec, index, dtype_bytes, kv_dtype_bytes) for index in range(spec.num_layers)),
        hidden_bytes=spec.hidden_size * dtype_bytes,
        head_parameters=spec.embedding_parameters,
        head_bytes=spec.embedding_parameters * dtype_bytes,
        vocabulary_bytes=spec.weight_bytes(dtype_bytes)
        - sum(spec.layer_bytes(index, dtype_bytes) for index in range(spec.num_layers)),
        activation_bytes_per_token=(_HIDDEN_COPIES * spec.hidden_size + widest) * dtype_bytes,
        logit_bytes=spec.vocab_size * _LOGIT_BYTES,
    )


def _layer(spec: ModelSpec, index: int, dtype_bytes: int, kv_dtype_bytes: int) -> LayerFigures:
    layer, matrices = spec.layer(index), spec.layer_matrices(index)
    routed = [matrix for matrix in matrices if matrix.part == "experts"]
    dense = [matrix for matrix in matrices if matrix.part != "experts"]
    num_experts = layer.experts.num_experts if layer.experts else 0
    return LayerFigures(
        dense_parameters=sum(matrix.num_parameters for matrix in dense),
        dense_bytes=sum(matrix.num_bytes(dtype_bytes) for matrix in dense),
        expert_parameters=sum(matrix.num_parameters for matrix in routed) // max(1, num_experts),
        expert_bytes=sum(matrix.num_bytes(dtype_bytes) for matrix in routed) // max(1, num_experts),
        num_experts=num_experts,
        experts_per_token=layer.experts.experts_per_token if layer.experts else 0,
        kv_bytes_per_token=2 * spec.num_kv_heads * spec.head_dim * kv_dtype_bytes,
        pair_flop=4 * spec.num_q_heads * spec.head_dim,
        window=layer.sliding_window,
    )
