"""What a machine does for a model, as figures: two processors, their memories, and the link between them."""

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RateCurve:
    """FLOP/s of linear operations over the tokens in a batch, as measured at some numbers of them.

    Between two points the seconds rise linearly, below the first they stay (the same tiles are computed, half empty),
    and beyond the last its rate holds.
    """

    points: tuple[tuple[float, float], ...]
    """(tokens, FLOP/s), by rising tokens; a batch of more tokens never takes less time."""
    _seconds: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """At each point, for 1 FLOP a token."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs at least one point")
        seconds = tuple(tokens / rate for tokens, rate in self.points)
        for (before, _), (after, _), early, late in zip(
            self.points, self.points[1:], seconds, seconds[1:], strict=False
        ):
            if not before < after:
                raise ValueError(f"tokens must rise, {after:g} follow {before:g}")
            if late < early:
                raise ValueError(f"{after:g} tokens take less time than {before:g}")
        object.__setattr__(self, "_seconds", seconds)

    def seconds(self, num_tokens: float, flop_per_token: float) -> float:
        """Of a batch of so many tokens; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        index = bisect_right(self.points, num_tokens, key=lambda point: point[0]) - 1
        if index < 0:
            return flop_per_token * self._seconds[0]
        tokens, rate = self.points[index]
        if index + 1 == len(self.points):
            return flop_per_token * num_tokens / rate
        share = (num_tokens - tokens) / (self.points[index + 1][0] - tokens)
        return flop_per_token * (self._seconds[index] + share * (self._seconds[index + 1] - self._seconds[index]))


@dataclass(frozen=True, slots=True)
class Processor:
    """One side's arithmetic and memory."""

    linear: RateCurve
    attention_flops_per_s: float
    """In attention of prompts; that of decodes is bound by reading KV."""
    bytes_per_s: float
    """Sustained, of weights from its own memory; infinite where `linear` was measured with reading them."""
    kv_bytes_per_s: float
    """Likewise of KV in attention of decodes."""
    memory_bytes: int
    """That weights, KV and activations may take together."""
    layer_s: float = 0.0
    """Of each layer, whatever is in it: launches, or the fork and join of threads."""
    kv_bytes: int | None = None
    """Of a KV cache of fixed size in that memory; None: KV takes what there is of it."""


@dataclass(frozen=True, slots=True)
class Link:
    """Between host and device."""

    up_bytes_per_s: float
    """Host to device, nothing going the other way."""
    down_bytes_per_s: float
    both_bytes_per_s: float
    """Each way, while both go at once."""
    hop_s: float = 0.0
    """From one processor's result to the other's start."""

    def rates(self, up_bytes: float, down_bytes: float) -> tuple[float, float]:
        """(up, down) bytes/s of an iteration that moves so much: the lesser traffic runs wholly beside the greater."""
        beside = min(up_bytes, down_bytes)
        return (
            _mean_rate(up_bytes, beside, self.up_bytes_per_s, self.both_bytes_per_s),
            _mean_rate(down_bytes, beside, self.down_bytes_per_s, self.both_bytes_per_s),
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """A host with one GPU."""

    name: str
    gpu: Processor
    cpu: Processor
    link: Link
    iteration_s: float = 0.0
    """Of an iteration beside its layers and head."""
    head: RateCurve | None = None
    """Of the output head and sampling, over the sequences that get a token; None: as other products on the GPU."""


def _mean_rate(num_bytes: float, beside: float, alone_per_s: float, both_per_s: float) -> float:
    """Of bytes some of which share the link."""
    if num_bytes <= 0:
        return alone_per_s
    seconds = beside / min(both_per_s, alone_per_s) + (num_bytes - beside) / alone_per_s
    return num_bytes / seconds if seconds > 0 else alone_per_s
