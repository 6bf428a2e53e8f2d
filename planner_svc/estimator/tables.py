"""What the executor measured at start-up, as values; `wire.py` makes them from OperationTables of the proto."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearPoint:
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    chunk_tokens: int
    past_tokens: int
    """Tokens of the sequence before the chunk."""
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    num_sequences: int
    context_tokens: int
    """Of all sequences together."""
    seconds: float


@dataclass(frozen=True, slots=True)
class OperationTables:
    """Seconds of each operation: per layer, except `head` and `iteration_s`, which are per iteration.

    A table without points is an operation that never runs here (no CPU attention attached, no KV on the GPU).
    """

    linear: tuple[LinearPoint, ...]
    prefill: tuple[PrefillPoint, ...]
    gpu_decode: tuple[DecodePoint, ...]
    cpu_decode: tuple[DecodePoint, ...]
    """As the first CPU attention service measures it, without the way there and back."""
    head: tuple[LinearPoint, ...]
    swap_bytes_per_s: float
    """0 where nothing can be swapped."""
    iteration_s: float
    """Cost of an iteration beside its layers, head and swaps."""
    cpu_copy: tuple[LinearPoint, ...] = ()
    """By sequences: what a trip to the CPU and back costs the GPU's side, per layer."""
    cpu_signal_s: float = 0.0
    """Per layer, until each side has noticed the other's doorbell."""
    cpu_pool_factors: tuple[float, ...] = ()
    """What attention takes in each host pool, in multiples of `cpu_decode`; () where there is but one."""
    cpu_linear: tuple[LinearPoint, ...] = ()
    """In layers that the CPU computes."""
    cpu_prefill: tuple[PrefillPoint, ...] = ()
    link_bytes_per_s: float = 0.0
    """Of weights from host memory to the device; 0 where it was not measured."""
