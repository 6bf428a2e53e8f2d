"""What prompts, and a sequence's blocks, cost at the executor's present pace; follows what results teach of it."""

from planner_svc.estimator import Calibration, Estimator, IterationLoad, SubBatchLoad
from planner_svc.scheduler.limits import Capacity
from planner_svc.scheduler.search import last_fitting
from planner_svc.scheduler.sequence import Sequence
from svc_common.plan import Mode

_KNEE_EXCESS = 1.05
"""A batch at the knee takes this many times what one token takes."""
_BATCH_KNEES = 8
_BATCH_TOKENS = 512
_FIXED_SHARE = 0.02
"""Without anything due, an iteration prefills at most so many knees or tokens, or as many as keep what it costs beside
its layers under this share, if that is more: still more would only make decodes wait."""
_RATE_KNEES = 4
_RATE_SHARE = 0.8
"""A batch of so many knees shows how fast prompts can be computed; decodes take the rest."""
_SHORTEST_S = 1e-9
_LINK_BLOCKS = 64
"""Moved at a time, to tell the link's speed from an iteration's fixed costs."""


class Costs:
    """Of one epoch."""

    def __init__(self, capacity: Capacity, calibration: Calibration) -> None:
        self._capacity = capacity
        self._calibration = calibration
        self.refresh()

    def refresh(self) -> None:
        """To be called when the calibration has seen another result."""
        estimator, capacity = self._calibration.estimator, self._capacity
        factor = self._calibration.factor(Mode.GPU_ONLY)
        self.knee_tokens = _knee_tokens(estimator, capacity.max_batch_tokens)
        """Tokens up to which linear operations take about the time of one: reading the weights bounds them."""
        self.most_tokens = _most_tokens(estimator, self.knee_tokens, capacity.max_batch_tokens)
        """What an iteration prefills at most where nothing is due."""
        num_tokens = _RATE_KNEES * self.knee_tokens
        seconds = estimator.iteration_s(IterationLoad(SubBatchLoad(prefill_chunks=((num_tokens, 0),), num_outputs=1)))
        self.prefill_tokens_per_s = _RATE_SHARE * num_tokens / max(_SHORTEST_S, seconds * factor)
        """At which prompts can be computed."""
        num_bytes = _LINK_BLOCKS * capacity.block_bytes
        fixed_s = estimator.iteration_s(IterationLoad())
        out_s = estimator.iteration_s(IterationLoad(swap_out_bytes=num_bytes)) - fixed_s
        in_s = estimator.iteration_s(IterationLoad(swap_in_bytes=num_bytes)) - fixed_s
        self.swap_block_s = (out_s + in_s) / _LINK_BLOCKS
        """Of the link, for a block, to the host and back."""

    @property
    def estimator(self) -> Estimator:
        """Corrected by what was observed so far."""
        return self._calibration.estimator

    def recompute_s(self, sequence: Sequence) -> float:
        """Seconds of the executor, for what of the sequence has been computed."""
        return sequence.num_computed_tokens / self.prefill_tokens_per_s


def _knee_tokens(estimator: Estimator, highest: int) -> int:
    limit_s = _KNEE_EXCESS * estimator.linear_s(1)
    return last_fitting(1, highest, lambda num_tokens: estimator.linear_s(num_tokens) <= limit_s)


def _most_tokens(estimator: Estimator, knee_tokens: int, highest: int) -> int:
    num_layers = estimator.num_layers
    one = IterationLoad(SubBatchLoad(((1, 0),), num_outputs=1))
    fixed_s = estimator.iteration_s(one) - num_layers * estimator.linear_s(1)
    limit_s = fixed_s / _FIXED_SHARE
    most = last_fitting(1, highest, lambda num: num_layers * estimator.linear_s(num) <= limit_s)
    return max(_BATCH_TOKENS, _BATCH_KNEES * knee_tokens, most)
