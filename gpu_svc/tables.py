"""What the profiler measures, as values; wire.py makes OperationTables of the proto from them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tables:
    """Seconds, as OperationTables of the proto; a table is empty where its operation cannot run."""

    linear: tuple[tuple[int, float], ...]
    """(num_tokens, one layer)"""
    prefill: tuple[tuple[int, int, float], ...]
    """(chunk_tokens, past_tokens, one layer)"""
    gpu_decode: tuple[tuple[int, int, float], ...]
    """(num_sequences, context_tokens of all, one layer)"""
    cpu_decode: tuple[tuple[int, int, float], ...]
    """(num_sequences, context_tokens of all, one layer without the way there and back)"""
    head: tuple[tuple[int, float], ...]
    """(num_outputs, one iteration)"""
    swap_bytes_per_s: float
    iteration_s: float
    cpu_copy: tuple[tuple[int, float], ...] = ()
    """(num_sequences, one layer)"""
    cpu_signal_s: float = 0.0
    cpu_pool_factors: tuple[float, ...] = ()
    """Of `cpu_decode`, by host pool; () for a single one."""
    cpu_linear: tuple[tuple[int, float], ...] = ()
    """(num_tokens, one layer of those that the CPU computes)"""
    cpu_prefill: tuple[tuple[int, int, float], ...] = ()
    """(chunk_tokens, past_tokens, attention in one of these)"""
    link_bytes_per_s: float = 0.0
