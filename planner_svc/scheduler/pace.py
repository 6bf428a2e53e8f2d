"""Whether the CPU has time for one more sequence: the pace of all of them once they all decode.

Admission by memory alone lets the CPU fall behind until nobody's tokens come in time.
"""

from collections.abc import Iterable
from math import ceil

from planner_svc.estimator import (
    Calibration,
    CohortLoad,
    Estimator,
    IterationLoad,
    PoolLoads,
    SubBatchLoad,
    hidden_cohort_layers,
    slowest_pool_s,
)
from planner_svc.scheduler.search import last_fitting
from planner_svc.scheduler.sequence import Sequence
from planner_svc.scheduler.urgency import bounds
from svc_common.plan import Mode, Tier

_MARGIN = 0.95
"""Of the pace that the tightest target asks for: contexts grow."""
_SHARE = 0.9
"""Of the tokens that the GPU alone could compute in that time, and that must remain possible: prompts are due, too."""
_SURPLUS = 2.0
"""Over what the CPU should attend at a time: some of it still prefills."""
_DRAINED = 0.3
"""Sequences of a cohort for each that waits, at most: it ends so many while the others are served. More would be left
to it alone in the end."""
_GAIN = 1.1
"""In throughput that the CPU must promise to be used at all: the end of a burst takes some of it back."""
_SHORTEST_S = 1e-9
"""An estimator without measurements says 0."""
_MOST_OF_ASKED = 1.4
"""On average over answers under way, of what the last hundred requests ask for, which are others. Of five loads
simulated with other values, 1.25 loses a burst of short answers on an A10G, and 1.45 one on an H100."""
_WEIGHT = 0.01
"""Of the newest request in the averages."""


class Mix:
    """How long prompts and answers are, on average over the last requests."""

    def __init__(self) -> None:
        self.prompt_tokens = 0.0
        self._asked_tokens = 0.0
        self._generated_tokens = 0.0
        self._num_finished = 0.0

    def arrive(self, sequence: Sequence) -> None:
        """Until answers end, they count as what is asked for at most."""
        self.prompt_tokens = _average(self.prompt_tokens, len(sequence.request.prompt))
        self._asked_tokens = _average(self._asked_tokens, sequence.request.max_new_tokens)

    def take_tokens(self, num_tokens: int) -> None:
        """Of any answers."""
        self._generated_tokens += num_tokens

    def finish(self) -> None:
        """An answer ended."""
        self._generated_tokens *= 1 - _WEIGHT
        self._num_finished = (1 - _WEIGHT) * self._num_finished + 1

    @property
    def output_tokens(self) -> float:
        """Tokens over ends: answers still under way count, so that those that end first, the short ones, don't mislead.

        The maximum likelihood of an exponential distribution of which part is still to come. No answer is longer than
        what is asked for, so on average they are not much longer than what the last ones ask for.
        """
        so_far = (self._asked_tokens + self._generated_tokens) / (1 + self._num_finished)
        return min(_MOST_OF_ASKED * self._asked_tokens, so_far)

    @property
    def prefill_per_decode(self) -> float:
        """Prompt tokens for each token of an answer."""
        return self.prompt_tokens / self.output_tokens if self.output_tokens else 1.0


def _average(before: float, value: float) -> float:
    return before + _WEIGHT * (value - before) if before else value


class Pace:
    """Sums over the residents of both tiers, those that still prefill counted as if they decoded."""

    def __init__(
        self,
        estimator: Estimator,
        calibration: Calibration,
        residents: Iterable[Sequence],
        max_tokens: int,
        max_sequences: int,
        prefill_per_decode: float,
        num_waiting: int,
        admits_all: bool,
        pool_shares: tuple[float, ...] = (),
    ) -> None:
        """`prefill_per_decode`: prompt tokens that come with each decode; 0 while no prompt waits.

        `pool_shares`: of the attention on the CPU, by host pool, where there are several.
        """
        self._pool_shares = pool_shares
        self._num_waiting = num_waiting
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._admits_all = admits_all
        self._alone: int | None = None
        self._best: float | None = None
        self._best_decodes = 0.0
        self._estimator = estimator
        self._calibration = calibration
        self._prefill_per_decode = prefill_per_decode
        self._residents = residents
        self._joined: list[tuple[Sequence, Tier]] = []
        self._is_summed = False
        self._num = {Tier.GPU: 0, Tier.HOST: 0}
        self._context = {Tier.GPU: 0, Tier.HOST: 0}
        self._tightest_s = float("inf")

    def join(self, sequence: Sequence, tier: Tier) -> None:
        """It is admitted in this plan."""
        if self._is_summed:
            self._add(sequence, tier)
        else:
            self._joined.append((sequence, tier))

    def _sum(self) -> None:
        """Not before somebody asks: most plans admit nobody to the host."""
        if self._is_summed:
            return
        self._is_summed = True
        in_time = [sequence for sequence in self._residents if not sequence.is_late]
        for tier in Tier:
            contexts = [max(item.num_computed_tokens, item.num_tokens) for item in in_time if item.tier is tier]
            self._num[tier] = len(contexts)
            self._context[tier] = sum(contexts) + len(contexts)
        targets = [item.request.targets.tpot_s for item in in_time if item.request.targets is not None]
        self._tightest_s = min(targets, default=float("inf"))
        for sequence, tier in self._joined:
            self._add(sequence, tier)

    def _add(self, sequence: Sequence, tier: Tier) -> None:
        if sequence.is_late:
            return  # It runs when there is time to spare.
        self._num[tier] += 1
        self._context[tier] += max(sequence.num_computed_tokens, sequence.num_tokens) + 1
        if bounds(sequence):
            assert sequence.request.targets is not None
            self._tightest_s = min(self._tightest_s, sequence.request.targets.tpot_s)

    def allows(self, sequence: Sequence) -> bool:
        """With targets, every token must still come in time; without, the CPU must not make the GPU wait."""
        if self._admits_all:
            return True
        self._sum()
        num_cpu = self._num[Tier.HOST] + 1
        cpu_context = self._context[Tier.HOST] + sequence.num_tokens + 1
        tightest_s = self._tightest_s
        if bounds(sequence):
            assert sequence.request.targets is not None
            tightest_s = min(tightest_s, sequence.request.targets.tpot_s)
        if tightest_s < float("inf"):
            limit_s = _MARGIN * tightest_s / self._calibration.factor(Mode.ASYMMETRIC)
            num_gpu = self._num[Tier.GPU]
            num_tokens = _SHARE * (self._prefill_alone(tightest_s) + num_gpu)
            num_prefill = max(0, round(num_tokens) - num_gpu - num_cpu)
            return any(seconds <= limit_s for seconds in self._options(num_cpu, cpu_context, num_prefill))
        # Half of the newcomer: on average the CPU then has what it should.
        return cpu_context - sequence.num_tokens / 2 <= _SURPLUS * self._best_cpu_context(sequence.num_tokens + 1)

    def is_worthwhile(self) -> bool:
        """Whether the decodes on the CPU, run with each iteration, raise throughput while prompts wait."""
        self._sum()
        context = self._context[Tier.HOST]
        return context > 0 and context <= 2 * self._best_cpu_context(context)

    def num_best_cpu_decodes(self) -> float:
        """Tokens that the CPU should decode in an iteration."""
        self._sum()
        self._best_cpu_context(1)
        return self._best_decodes

    def _best_cpu_context(self, newcomer: int) -> float:
        """Tokens on the CPU with which most tokens a second come, each with the prefill that its successor needs."""
        if self._best is None:
            num = sum(self._num.values())
            mean_context = sum(self._context.values()) / num if num else newcomer
            counts, count = [0], 1
            while count <= self._max_sequences:
                counts.append(count)
                count += max(1, count // 3)
            rates = [(*self._rate(count, round(count * mean_context)), count) for count in counts]
            fastest = max(rates, key=lambda rate: rate[0])
            if self._num[Tier.HOST] == 0 and fastest[0] < _GAIN * rates[0][0]:
                fastest = rates[0]
            _, self._best_decodes, best = fastest
            self._best = mean_context * best
        return self._best

    def _rate(self, num_cpu: int, cpu_context: int) -> tuple[float, float]:
        """(tokens per second, those of the CPU in an iteration) with so many sequences on the CPU."""
        num_all = self._num[Tier.GPU] + num_cpu
        num_prefill = round(self._prefill_per_decode * num_all)
        options = self._options(num_cpu, cpu_context, num_prefill)
        rate = (num_all / max(_SHORTEST_S, min(options if num_cpu else options[:1])), float(num_cpu))
        if 0 < num_cpu <= _DRAINED * self._num_waiting:
            return max(rate, self._cohort_rate(num_cpu, cpu_context))
        return rate

    def _cohort_rate(self, num_cpu: int, cpu_context: int) -> tuple[float, float]:
        """The same with a cohort and the batch beside it, which prefills for both."""
        estimator, num_gpu = self._estimator, self._num[Tier.GPU]
        gpu_context, num_layers = self._context[Tier.GPU], estimator.num_layers
        pools = self._pools(num_cpu, cpu_context)
        attention_s = slowest_pool_s(estimator, num_cpu, cpu_context, pools)
        num_hidden = 0.0
        for _ in range(3):  # Its tokens call for prefill, which hides more of its layers.
            num_tokens = num_gpu + num_cpu * num_hidden / num_layers
            num_prefill = round(self._prefill_per_decode * num_tokens)
            layer_s = estimator.linear_s(num_gpu + num_prefill) + estimator.prefill_s(num_prefill, 0)
            layer_s += estimator.gpu_decode_s(num_gpu, gpu_context)
            num_hidden = min(num_layers, hidden_cohort_layers(num_layers, layer_s, attention_s))
        cohort = CohortLoad(num_cpu, cpu_context, max(1, round(num_hidden)), cpu_pools=pools)
        chunks = ((num_prefill, 0),) if num_prefill else ()
        batch = SubBatchLoad(chunks, num_gpu, gpu_context, num_outputs=num_gpu)
        seconds = estimator.iteration_s(IterationLoad(batch, cohort=cohort))
        num_decodes = num_cpu * cohort.num_layers / num_layers
        return (num_gpu + num_decodes) / max(_SHORTEST_S, seconds), num_decodes

    def _pools(self, num_cpu: int, cpu_context: int) -> PoolLoads:
        """So much on the CPU as it lies in the pools while these are in balance."""
        return tuple([(ceil(num_cpu * share), ceil(cpu_context * share)) for share in self._pool_shares])

    def _prefill_alone(self, longest_s: float) -> int:
        """Prefill tokens that an iteration of the GPU alone could take."""
        if self._alone is None:
            limit_s = longest_s / self._calibration.factor(Mode.GPU_ONLY)
            self._alone = last_fitting(0, self._max_tokens, lambda n: self._one_s(0, 0, n) <= limit_s)
        return self._alone

    def _one_s(self, num_cpu: int, cpu_context: int, num_prefill: int) -> float:
        """An iteration of one batch in which all decode."""
        num_gpu, gpu_context = self._num[Tier.GPU], self._context[Tier.GPU]
        chunks = ((num_prefill, 0),) if num_prefill else ()
        num_outputs = num_gpu + num_cpu
        pools = self._pools(num_cpu, cpu_context)
        batch = SubBatchLoad(
            chunks, num_gpu, gpu_context, num_cpu, cpu_context, num_outputs=num_outputs, cpu_pools=pools
        )
        return self._estimator.iteration_s(IterationLoad(batch))

    def _options(self, num_cpu: int, cpu_context: int, num_prefill: int) -> tuple[float, float]:
        """Iterations in which all decode, in one batch and in two."""
        num_gpu, gpu_context = self._num[Tier.GPU], self._context[Tier.GPU]
        half = num_cpu // 2
        half_context = cpu_context * half // max(1, num_cpu)
        num_second = min(num_prefill, max(0, (num_gpu + num_cpu + num_prefill) // 2 - half))
        first, second = (((n, 0),) if n else () for n in (num_prefill - num_second, num_second))
        rest, rest_context = num_cpu - half, cpu_context - half_context
        two_s = self._estimator.iteration_s(
            IterationLoad(
                SubBatchLoad(
                    first,
                    num_gpu,
                    gpu_context,
                    rest,
                    rest_context,
                    num_outputs=num_gpu + rest,
                    cpu_pools=self._pools(rest, rest_context),
                ),
                SubBatchLoad(
                    second,
                    num_cpu_decodes=half,
                    cpu_context_tokens=half_context,
                    num_outputs=half,
                    cpu_pools=self._pools(half, half_context),
                ),
            )
        )
        return self._one_s(num_cpu, cpu_context, num_prefill), two_s
