"""Sizes an iteration and chooses its mode: the most useful tokens per second among what every due token allows.

Choices: the GPU alone; one batch with CPU decodes, attended beside the GPU's attention of the same layer; two
sub-batches, each hiding the CPU attention of the other behind its linear operations (NEO, MLSys 2025, section 4); one
batch beside a cohort of offloaded sequences that takes several iterations for a token. A step that a cohort has begun
leaves no choice: it goes on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner_svc.estimator import Calibration
from planner_svc.scheduler.candidates import Shape, Work
from planner_svc.scheduler.limits import ModePolicy
from planner_svc.scheduler.search import last_fitting
from planner_svc.scheduler.urgency import bounds, is_aged

_LEAD = 1.1
"""Of prefill over decoding while prompts wait for room: enough that room never waits for prompts."""
_SHORTEST_S = 1e-9
"""An estimator without measurements says 0."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an iteration may be."""

    longest_s: float
    """Until the first due token; inf where nothing is due."""
    num_prefill_tokens: int
    """Most that are worth computing at once."""
    num_free_tokens: int
    """Up to so many tokens a batch costs little more than one."""
    prefill_tokens_per_s: float
    """That keep every first token in time."""
    num_paced: float | None
    """Decodes of an iteration for which prompts should follow; None where all that wait have room at once."""
    runs_cpu: bool
    """Leaving the CPU idle for the sake of this iteration would cost the next ones more."""
    prefill_worth: float
    """Of a prefill token, in decoded tokens."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The shape to run and what is thought of it."""

    shape: Shape
    predicted_s: float
    """How long it takes."""


def decide(
    work: Work,
    limits: Bounds,
    calibration: Calibration,
    policy: ModePolicy,
    start_s: float,
    is_stepping: bool,
    has_cpu_layers: bool,
) -> Decision:
    """Chooses among what has room. `is_stepping`: the cohort's step is under way. Changes nothing.

    With CPU layers two sub-batches may pay without any CPU decode: one is in the CPU's layers while the other is in the
    GPU's.
    """
    chooser = _Chooser(work, limits, calibration)
    num_all = len(work.cpu_decodes)
    if is_stepping or (policy == "decoupled" and work.cohort):
        return max(chooser.beside_cohort(), key=chooser.worth)
    if policy in ("asymmetric", "same_layer"):
        return chooser.fill(num_all, is_split=policy == "asymmetric" and num_all > 0)
    num_due = _num_due(work, limits, start_s)
    options: list[Decision] = []
    if num_due == 0 and not (limits.runs_cpu and num_all):
        options.append(chooser.fill(0))
        if has_cpu_layers and work.chunks:
            options.append(chooser.fill(0, is_split=True))
    for is_split in (False, True) if num_all else ():
        counts = {chooser.largest(num_due, num_all, is_split), chooser.hidden(num_due, num_all, is_split), num_due}
        options += [chooser.fill(count, is_split) for count in sorted(counts) if count]
    if work.cohort:
        options += chooser.beside_cohort()
    return max(options, key=chooser.worth)  # Of equals the first, and so the simplest.


def _num_due(work: Work, limits: Bounds, start_s: float) -> int:
    """CPU decodes, from the first, that can't wait for the iteration after this one."""
    horizon_s = start_s + 2 * limits.longest_s
    for index in range(len(work.cpu_decodes) - 1, -1, -1):
        sequence = work.cpu_decodes[index]
        if is_aged(sequence) or (bounds(sequence) and sequence.due_s < horizon_s):
            return index + 1
    if work.cpu_decodes and not (work.chunks or work.gpu_decodes):
        return 1
    return 0


class _Chooser:
    """Prices shapes of one Work."""

    def __init__(self, work: Work, limits: Bounds, calibration: Calibration) -> None:
        self._work = work
        self._limits = limits
        self._calibration = calibration
        self._num_prefill = min(work.num_prefill_tokens, limits.num_prefill_tokens)

    def worth(self, decision: Decision) -> float:
        """Useful tokens per second; less than any other where a due token comes too late."""
        shape, predicted_s = decision.shape, max(_SHORTEST_S, decision.predicted_s)
        worth = (self._work.num_decodes(shape) + self._limits.prefill_worth * shape.num_prefill_tokens) / predicted_s
        return worth if predicted_s <= self._limits.longest_s else -predicted_s

    def beside_cohort(self) -> list[Decision]:
        """The cohort's step goes on, in equal parts until its end: as large as the batch hides, or a little larger.

        The first makes the CPU wait, the second the GPU.
        """
        num_left = self._work.num_cohort_layers_left
        shape = self.fill(0).shape
        for _ in range(2):  # The cohort's tokens allow for more prefill, which hides more of its layers.
            num_parts = max(1, min(num_left, math.ceil(num_left / self._work.hidden_cohort_layers(shape))))
            hidden = self.fill(0, num_cohort_layers=-(-num_left // num_parts))
            shape = hidden.shape
        if num_parts == 1:
            return [hidden]
        return [hidden, self.fill(0, num_cohort_layers=-(-num_left // (num_parts - 1)))]

    def fill(self, num_cpu_decodes: int, is_split: bool = False, num_cohort_layers: int = 0) -> Decision:
        """With as much prefill as the time allows."""

        def make(num_tokens: int) -> Shape:
            return Shape(num_tokens, num_cpu_decodes, is_split, num_cohort_layers)

        num_tokens = self._most(0, self._num_wanted(make), make)
        has_decodes = self._work.gpu_decodes or num_cpu_decodes or num_cohort_layers
        if num_tokens == 0 and not has_decodes and self._num_prefill:
            num_tokens = self._num_prefill  # Nothing is due: it was a prompt's own deadline.
        return Decision(make(num_tokens), self._predicted_s(make(num_tokens)))

    def _num_wanted(self, make: Callable[[int], Shape]) -> int:
        """Prefill tokens that cost little, or what due first tokens need if that is more."""
        limits = self._limits
        shape = make(0)
        num_batches = 2 if shape.is_split else 1
        wanted = max(0, num_batches * limits.num_free_tokens - len(self._work.gpu_decodes) - shape.num_cpu_decodes)
        if limits.longest_s == float("inf"):
            if limits.num_paced is None:
                return self._num_prefill
            num_decodes = max(limits.num_paced, self._work.num_decodes(shape))
            return min(max(wanted, math.ceil(_LEAD * num_decodes / limits.prefill_worth)), self._num_prefill)
        for _ in range(3):
            predicted_s = self._predicted_s(make(min(wanted, self._num_prefill)))
            wanted = max(wanted, round(limits.prefill_tokens_per_s * predicted_s))
        return min(wanted, self._num_prefill)

    def largest(self, lowest: int, highest: int, is_split: bool) -> int:
        """CPU decodes that the time allows without any prefill, at least `lowest`."""
        return self._most(lowest, highest, lambda count: Shape(0, count, is_split))

    def hidden(self, lowest: int, highest: int, is_split: bool) -> int:
        """CPU decodes whose attention stays hidden beside as much prefill as there is, or as is wanted with them."""

        def fits(count: int) -> bool:
            num_tokens = self._num_prefill
            if self._limits.longest_s == float("inf"):
                num_tokens = self._num_wanted(lambda num: Shape(num, count, is_split))
            return self._work.cpu_excess_s(Shape(num_tokens, count, is_split)) <= 0

        return last_fitting(lowest, highest, fits)

    def _most(self, lowest: int, highest: int, make: Callable[[int], Shape]) -> int:
        if self._limits.longest_s == float("inf"):
            return highest
        return last_fitting(lowest, highest, lambda count: self._predicted_s(make(count)) <= self._limits.longest_s)

    def _predicted_s(self, shape: Shape) -> float:
        return self._work.seconds(shape) * self._calibration.factor(shape.mode)
