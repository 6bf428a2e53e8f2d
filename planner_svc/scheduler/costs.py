"""What it costs to take a sequence's blocks away and give them back: moving its KV, or computing it again."""

from planner_svc.estimator import EMPTY_LOAD, Calibration, Estimator, SubBatchLoad
from planner_svc.scheduler.limits import Capacity
from planner_svc.scheduler.search import last_fitting
from planner_svc.scheduler.sequence import Sequence
from svc_common.plan import Mode

_KNEE_EXCESS = 1.05
"""A batch at the knee takes this many times what one token takes."""
_RATE_KNEES = 4
_RATE_SHARE = 0.8
"""A batch of so many knees shows how fast prompts can be computed; decodes take the rest."""
_SHORTEST_S = 1e-9
_LINK_BLOCKS = 64
"""Moved at a time, to tell the link's speed from an iteration's fixed costs."""


def knee_tokens(estimator: Estimator, highest: int) -> int:
    """Tokens up to which linear operations take about the time of one: reading the weights bounds them."""
    limit_s = _KNEE_EXCESS * estimator.linear_s(1)
    return last_fitting(1, highest, lambda num_tokens: estimator.linear_s(num_tokens) <= limit_s)


def prefill_tokens_per_s(estimator: Estimator, knee: int) -> float:
    """How fast prompts can be computed, uncalibrated."""
    num_tokens = _RATE_KNEES * knee
    seconds = estimator.iteration_s(SubBatchLoad(prefill_chunks=((num_tokens, 0),), num_outputs=1))
    return _RATE_SHARE * num_tokens / max(_SHORTEST_S, seconds)


class Costs:
    """Of one epoch."""

    def __init__(self, capacity: Capacity, estimator: Estimator, calibration: Calibration) -> None:
        self._calibration = calibration
        rate = prefill_tokens_per_s(estimator, knee_tokens(estimator, capacity.max_batch_tokens))
        self._token_s = 1 / rate
        num_bytes = _LINK_BLOCKS * capacity.block_bytes
        fixed_s = estimator.iteration_s(EMPTY_LOAD)
        out_s = estimator.iteration_s(EMPTY_LOAD, EMPTY_LOAD, num_bytes, 0) - fixed_s
        in_s = estimator.iteration_s(EMPTY_LOAD, EMPTY_LOAD, 0, num_bytes) - fixed_s
        self._swap_block_s = (out_s + in_s) / _LINK_BLOCKS

    def swap_block_s(self) -> float:
        """Seconds of the link for a block, to the host and back."""
        return self._swap_block_s

    def recompute_s(self, sequence: Sequence) -> float:
        """Seconds of the executor, for what of the sequence has been computed."""
        return sequence.num_computed_tokens * self._token_s * self._calibration.factor(Mode.GPU_ONLY)
