"""The shape of a decoder, as values: what the executor builds, the planner sizes and the estimator prices."""

from dataclasses import dataclass
from typing import Literal


class UnsupportedModelError(Exception):
    """The model cannot be served; the text names the architecture or the feature."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the first `rotary_dim` elements of each head, half-split pairs."""

    theta: float
    rotary_dim: int
    scaling: Literal["none", "linear", "llama3", "yarn", "dynamic"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family: pre-norm RMSNorm, rotary embedding, grouped heads, gated SiLU MLP."""

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
    rms_norm_eps: float
    rope: RopeSpec
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

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    @property
    def num_parameters(self) -> int:
        """Weights of embedding, layers and head; norms and biases, well under 0.1 %, are left out."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_q_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings
