"""What a machine can do and what a model asks of it, as figures: all that an analytic estimate needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A decoder of the Llama family in 16 bits."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's linear operations."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_q_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def kv_bytes_per_token_layer(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """Peaks, the share of each that is reached, and fixed costs."""

    gpu_flops_per_s: float
    linear_efficiency: float
    """Of the GPU's FLOP/s, in linear operations."""
    attention_efficiency: float
    """Of the GPU's FLOP/s, in prefill attention."""
    gpu_bytes_per_s: float
    gpu_bandwidth_efficiency: float
    cpu_bytes_per_s: float
    cpu_bandwidth_efficiency: float
    link_bytes_per_s: float
    """Each way."""
    launch_s: float
    """Of one layer's linear operations."""
    cpu_sequence_s: float
    """CPU attention: for each sequence and layer."""
    cpu_hop_s: float
    """CPU attention: for each layer, to the CPU and back."""
    iteration_s: float
    """Of an iteration, beside layers, head and swaps."""
