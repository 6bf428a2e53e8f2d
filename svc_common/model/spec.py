"""The shape of a decoder, as values: what the executor builds, the planner sizes and the estimator prices."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import prod
from typing import Literal

MAX_LAYERS = 256


class UnsupportedModelError(Exception):
    """The model cannot be served; the text names the architecture or the feature."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the first `rotary_dim` elements of each head, half-split pairs."""

    theta: float
    rotary_dim: int
    scaling: Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()
    """Of longrope: what each base frequency is divided by, rotary_dim / 2 of them."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A layer's MLP as a mixture of experts: each token goes through the few that its router scores highest."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of each expert."""
    normalised: bool
    """Whether the weights of a token's experts are made to add up to 1."""
    shared_intermediate_size: int = 0
    """Of an expert that all tokens go through, weighted by a gate of its own; 0: there is none."""


Activation = Literal["silu_gated", "gelu_tanh_gated", "relu"]
"""Of an MLP. Gated: one half of its inner elements, through the function, times the other half."""

Part = Literal["attention", "mlp", "experts"]


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """One weight matrix, or the stack of all experts'."""

    name: str
    """As in svc_common.decoder.weights.LayerWeights."""
    part: Part
    shape: tuple[int, ...]
    """[out, in], or [num_experts, out, in]."""
    always_fp32: bool = False
    """Whatever the weights' type."""

    @property
    def num_parameters(self) -> int:
        return prod(self.shape)

    def num_bytes(self, dtype_bytes: int) -> int:
        """With weights of so many bytes each."""
        return self.num_parameters * (4 if self.always_fp32 else dtype_bytes)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What layers of one model may differ in."""

    sliding_window: int
    """Tokens each query sees, itself included; 0: all."""
    rope: RopeSpec | None
    """None: q and k are not rotated."""
    experts: ExpertsSpec | None
    """None: one MLP."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A pre-norm decoder with grouped heads. The defaults are those of the Llama family."""

    architecture: str
    """As the configuration names it, e.g. "LlamaForCausalLM"; for GGUF its general.architecture, e.g. "llama"."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    rope: RopeSpec | None
    """None: no rotary embedding."""
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: Literal["fp32", "bf16", "fp16"]
    """Type of the weights in the file; of what they were quantised from, for GGUF."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    """Tokens each query sees, itself included; None: all."""
    full_layers: tuple[int, ...] = ()
    """Layers without the sliding window."""
    local_rope: RopeSpec | None = None
    """Of the layers with the sliding window, where theirs is another; as wide as `rope`."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with biases."""
    post_norms: bool = False
    """Whether what attention and MLP add to the hidden state is normalised, too."""
    activation: Activation = "silu_gated"
    attention_scale: float | None = None
    """Factor on q·k before the softmax; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """c: a score s counts as c * tanh(s / c); 0: as it is."""
    logit_softcap: float = 0.0
    """The same for logits."""
    embedding_scale: float = 1.0
    learned_positions: int | None = None
    """Row of position 0 in a table of learned positions that is added to the embedding; None: no such table."""
    experts: ExpertsSpec | None = None
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP where the others have experts."""

    @property
    def digest(self) -> str:
        """16 hex digits: two services that read the same one mean the same model, its weights aside."""
        return sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]

    def layer(self, index: int) -> LayerSpec:
        local = self.sliding_window is not None and index not in self.full_layers
        return LayerSpec(
            sliding_window=(self.sliding_window or 0) if local else 0,
            rope=self.local_rope if local and self.local_rope else self.rope,
            experts=None if index in self.dense_layers else self.experts,
        )

    @property
    def layers(self) -> Iterator[LayerSpec]:
        return map(self.layer, range(self.num_layers))

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def gated(self) -> bool:
        return self.activation != "relu"

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def layer_matrices(self, index: int) -> tuple[MatrixSpec, ...]:
        """All matrices of a layer, fused as they are kept; norms and biases, well under 0.1 %, are left out."""
        hidden, q_size = self.hidden_size, self.num_q_heads * self.head_dim
        attention = (
            MatrixSpec("qkv", "attention", (q_size + 2 * self.num_kv_heads * self.head_dim, hidden)),
            MatrixSpec("output", "attention", (hidden, q_size)),
        )
        experts = self.layer(index).experts
        if experts is None:
            inner = self.intermediate_size
            up_rows = 2 * inner if self.gated else inner
            return (*attention, MatrixSpec("up", "mlp", (up_rows, hidden)), MatrixSpec("down", "mlp", (hidden, inner)))
        number, inner, shared = experts.num_experts, experts.intermediate_size, experts.shared_intermediate_size
        routed = (
            MatrixSpec("router", "mlp", (number, hidden), always_fp32=True),
            MatrixSpec("experts.up", "experts", (number, 2 * inner, hidden)),
            MatrixSpec("experts.down", "experts", (number, hidden, inner)),
        )
        if not shared:
            return (*attention, *routed)
        return (
            *attention,
            *routed,
            MatrixSpec("shared.up", "mlp", (2 * shared, hidden)),
            MatrixSpec("shared.down", "mlp", (hidden, shared)),
            MatrixSpec("shared.gate", "mlp", (1, hidden), always_fp32=True),
        )

    def layer_parameters(self, index: int) -> int:
        return sum(matrix.num_parameters for matrix in self.layer_matrices(index))

    def layer_bytes(self, index: int, dtype_bytes: int) -> int:
        """Of a layer's matrices."""
        return sum(matrix.num_bytes(dtype_bytes) for matrix in self.layer_matrices(index))

    @property
    def embedding_parameters(self) -> int:
        """Of the token embedding; the head has as many, where it is not the same."""
        return self.vocab_size * self.hidden_size

    @property
    def position_parameters(self) -> int:
        """Of the table of learned positions."""
        if self.learned_positions is None:
            return 0
        return (self.learned_positions + self.context_tokens) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights of embeddings, layers and head; norms and biases are left out."""
        return sum(map(self.layer_parameters, range(self.num_layers))) + self._vocabulary_parameters

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Of the same weights, each of so many bytes."""
        layers = sum(self.layer_bytes(layer, dtype_bytes) for layer in range(self.num_layers))
        return layers + self._vocabulary_parameters * dtype_bytes

    @property
    def _vocabulary_parameters(self) -> int:
        return self.embedding_parameters * (1 if self.tie_embeddings else 2) + self.position_parameters
