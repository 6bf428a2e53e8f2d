"""Corrects predictions by what iterations really took: each part of the cost by itself, and then what remains."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from planner_svc.estimator.estimator import Estimator, IterationLoad
from planner_svc.estimator.fit import Fit
from planner_svc.estimator.terms import Factors, Terms
from svc_common.plan import Mode, PoolWork, Timings

_WEIGHT = 0.1
"""Of the newest ratio in the moving average: about the last ten iterations count."""
_LOWEST, _HIGHEST = 0.5, 2.0
"""Of what remains for a mode."""
_NUM_RATIOS = 3
"""Their median counts, so that one stall does not."""


class Calibration:
    """Multipliers for each part of an estimator's cost model, and one for each mode on top."""

    def __init__(self, estimator: Estimator) -> None:
        self.base = estimator
        """As it was given, uncorrected."""
        self._factors = Factors()
        self.estimator = estimator.calibrated(self._factors)
        """Predicts as `estimator`, each part corrected by what was observed so far."""
        self._gpu = Fit((1.0, 1.0, 1.0, 1.0, 1.0, 0.0))
        self._head, self._swap = Fit((1.0,)), Fit((1.0,))
        self._cpus = defaultdict[int, Fit](lambda: Fit((1.0,)))
        """By host pool."""
        self._remainders: dict[Mode, _Remainder] = {}

    @property
    def factors(self) -> Factors:
        """Of each part of the cost, as they are now: a copy."""
        return replace(self._factors)

    def factor(self, mode: Mode) -> float:
        """Multiply a prediction of `estimator` by this: what its parts together still miss in this mode."""
        return self._remainders[mode].value if mode in self._remainders else 1.0

    def observe(self, mode: Mode, load: IterationLoad, timings: Timings, pool_work: Sequence[PoolWork] = ()) -> None:
        """`load`: what the iteration was planned to do. `pool_work`: of each host pool, where there are several.

        An iteration without a prediction or without a clock says nothing.
        """
        total_s = timings.total_ns / 1e9
        if total_s <= 0:
            return
        self._fit(self.estimator.terms(load), timings, pool_work)
        predicted_s = self.estimator.iteration_s(load)
        if predicted_s > 0:
            self._remainders.setdefault(mode, _Remainder()).observe(total_s / predicted_s)

    def _fit_cpus(self, terms: Terms, timings: Timings, pool_work: Sequence[PoolWork]) -> None:
        factors = self._factors
        if not terms.cpu_pools_s:
            self._cpus[0].observe((terms.cpu_decode_s / factors.cpu_decode,), timings.cpu_attention_ns / 1e9)
        for pool, (seconds, work) in enumerate(zip(terms.cpu_pools_s, pool_work, strict=False)):
            self._cpus[pool].observe((seconds / factors.cpu_pool(pool),), work.attention_ns / 1e9)
            if pool and seconds > 0:
                factors.further_pools[pool] = self._cpus[pool].values[0]
        factors.cpu_decode = self._cpus[0].values[0]

    def _fit(self, terms: Terms, timings: Timings, pool_work: Sequence[PoolWork]) -> None:
        """`terms` are multiplied by the factors so far."""
        factors = self._factors
        head_s, swap_s = timings.head_ns / 1e9, timings.swap_ns / 1e9
        self._fit_cpus(terms, timings, pool_work)
        self._head.observe((terms.head_s / factors.head,), head_s)
        if swap_s > 0 and terms.swap_s > 0:
            self._swap.observe((terms.swap_s / factors.swap,), swap_s + terms.swap_hidden_s)
        waits_ns = timings.cpu_wait_ns + timings.weight_wait_ns + timings.prompt_logprobs_ns
        known_s = waits_ns / 1e9 + swap_s + (head_s or terms.head_s)
        gpu = (
            terms.weights_s / factors.weights,
            terms.tokens_s / factors.tokens,
            terms.prefill_s / factors.prefill,
            terms.gpu_decode_s / factors.gpu_decode,
            terms.overhead_s / factors.overhead,
            terms.overlap_s,
        )
        self._gpu.observe(gpu, timings.total_ns / 1e9 - known_s)
        factors.head, factors.swap = self._head.values[0], self._swap.values[0]
        (
            factors.weights,
            factors.tokens,
            factors.prefill,
            factors.gpu_decode,
            factors.overhead,
            factors.contention,
        ) = self._gpu.values


class _Remainder:
    """A moving average of measured / predicted."""

    def __init__(self) -> None:
        self.value = 1.0
        self._last: deque[float] = deque(maxlen=_NUM_RATIOS)

    def observe(self, ratio: float) -> None:
        self._last.append(ratio)
        ratio = min(_HIGHEST, max(_LOWEST, median(self._last)))
        self.value += _WEIGHT * (ratio - self.value)
