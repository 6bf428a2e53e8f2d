"""What applying a result tells the engine, and what was counted so far."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from svc_common.plan import TokenLogprobs


class TokenEvent(NamedTuple):
    """One more token of a sequence. A tuple: a result brings hundreds, and a frozen dataclass takes twice as long."""

    sequence_id: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish: Literal["end_token", "length"] | None
    """Why this is the last one. The sequence is gone from the scheduler."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What one result changed, in the result's order."""

    tokens: tuple[TokenEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """What became of one sequence's KV."""

    num_recomputations: int = 0
    """How often it was given up."""
    num_cached_tokens: int = 0
    """Of its prompt, found computed when it was first admitted."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the scheduler was made; resets keep them."""

    gpu_only_iterations: int = 0
    """Applied iterations that computed without CPU attention."""
    asymmetric_iterations: int = 0
    """Applied iterations of two sub-batches with CPU attention."""
    same_layer_iterations: int = 0
    """Applied iterations of one batch with CPU attention."""
    decoupled_iterations: int = 0
    """Applied iterations beside which a cohort advanced."""
    preemptions: int = 0
    """Sequences that lost their place to another: moved to the host or recomputed."""
    swaps_out: int = 0
    """Sequences moved to the host, preempted or outgrown."""
    swaps_in: int = 0
    """Sequences moved to the GPU."""
    recomputed_tokens: int = 0
    """Scheduled tokens whose KV had been computed before."""
    prefilled_tokens: int = 0
    """Scheduled tokens of prompts, each counted once."""
    cached_tokens: int = 0
    """Tokens of admitted prompts that were found computed."""
    generated_tokens: int = 0
    """Handed out by `apply`."""


class Tally:
    """Keeps the counters; shared by whoever has something to count."""

    def __init__(self) -> None:
        self.counters = Counters()

    def add(self, **increments: int) -> None:
        """Raises counters by name."""
        current = self.counters
        self.counters = replace(current, **{name: getattr(current, name) + by for name, by in increments.items()})
