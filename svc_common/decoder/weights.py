"""A decoder's weights as tensors: what a file is read into, and what the decoders compute with or pack."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormWeights:
    """RMSNorm, or with a bias LayerNorm."""

    weight: Tensor  # [hidden_size]
    bias: Tensor | None = None  # [hidden_size]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Matrices are [out, in]."""

    up: Tensor  # [inner_size, hidden_size]; where gated, [2 * inner_size, hidden_size]: gate, up
    down: Tensor  # [hidden_size, inner_size]
    up_bias: Tensor | None = None  # [inner_size], where gated [2 * inner_size]
    down_bias: Tensor | None = None  # [hidden_size]


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """A layer's MLPs, and who chooses among them."""

    router: Tensor  # [num_experts, hidden_size], fp32
    mlps: tuple[MlpWeights, ...]
    shared: MlpWeights | None = None
    shared_gate: Tensor | None = None  # [hidden_size], fp32


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, in the compute type. Matrices are [out, in]; what is read together is kept together."""

    attention_norm: NormWeights
    qkv: Tensor  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]: q, k, v
    output: Tensor  # [hidden_size, num_q_heads * head_dim]
    mlp_norm: NormWeights
    mlp: MlpWeights | ExpertsWeights
    qkv_bias: Tensor | None = None  # [(num_q_heads + 2 * num_kv_heads) * head_dim]
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]
    output_bias: Tensor | None = None  # [hidden_size]
    post_attention_norm: Tensor | None = None  # [hidden_size], of what attention adds to the hidden state
    post_mlp_norm: Tensor | None = None  # [hidden_size], of what the MLP adds


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The whole model. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    head: Tensor  # [vocab_size, hidden_size]
    positions: Tensor | None = None  # [learned_positions + context_tokens, hidden_size]

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device; a tied head counts once."""
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors(self)}.values())


def tensors(weights: object) -> Iterator[Tensor]:
    """All tensors in a tree of the classes above."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from tensors(part)
    elif weights is not None:
        for entry in fields(weights):  # type: ignore[arg-type]
            yield from tensors(getattr(weights, entry.name))
