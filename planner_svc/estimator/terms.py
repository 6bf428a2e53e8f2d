"""The parts of an iteration's cost: what each is predicted to take, and by what online calibration multiplies it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Factors:
    """Multipliers of an estimator's operations. Changed by Calibration, read by the estimator that was made with it."""

    weights: float = 1.0
    """Linear operations: what a single token takes."""
    tokens: float = 1.0
    """Linear operations: what further tokens add."""
    prefill: float = 1.0
    gpu_decode: float = 1.0
    overhead: float = 1.0
    """Of an iteration, and of trips to the CPU on the GPU's side."""
    contention: float = 0.0
    """By how much of the time in which both processors work the GPU's work gets longer."""
    cpu_decode: float = 1.0
    """Of the first host pool."""
    further_pools: dict[int, float] = field(default_factory=dict)
    """Attention in the other host pools, by number."""
    head: float = 1.0
    swap: float = 1.0

    def cpu_pool(self, pool: int) -> float:
        """Of attention in one host pool; as in the first one while nothing is known."""
        return self.further_pools.get(pool, self.cpu_decode)


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds of one iteration over all its layers, each part as if it ran alone.

    weights + tokens + prefill + gpu_decode + overhead is the GPU's work beside head and swaps.
    """

    weights_s: float = 0.0
    tokens_s: float = 0.0
    prefill_s: float = 0.0
    gpu_decode_s: float = 0.0
    overhead_s: float = 0.0
    overlap_s: float = 0.0
    """In which the GPU and the CPU both work."""
    cpu_wait_s: float = 0.0
    """In which the GPU waits for the CPU."""
    cpu_decode_s: float = 0.0
    """Attention on the CPU without the way there, of all pools together."""
    cpu_pools_s: tuple[float, ...] = ()
    """The same by host pool, where there are several."""
    head_s: float = 0.0
    swap_s: float = 0.0
    weight_wait_s: float = 0.0
    """In which the GPU waits for weights that are streamed."""
    swap_hidden_s: float = 0.0
    """So much of a longer swap goes on beside the layers."""
