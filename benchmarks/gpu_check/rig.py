"""An epoch full of sequences whose contexts are as long as is wanted without having been computed."""

import statistics
from dataclasses import dataclass

from gpu_check.cases import BLOCK_TOKENS, Case
from gpu_svc.executor import Executor
from svc_common.plan import CohortStep, IterationPlan, IterationResult, Mode, NewSequence, SubBatch, Tier


@dataclass(frozen=True)
class Load:
    """What the host attends in a mode, and what the estimator thinks of it."""

    in_first: int
    """Sequences in the first sub-batch, or the only one."""
    in_second: int
    """In the second one, or in the cohort."""
    cohort_layers: int
    predicted_s: float
    tokens: float
    """Of an iteration, on average."""

    @property
    def on_host(self) -> int:
        return self.in_first + self.in_second


class Rig:
    """An open epoch: as many sequences on the device as it has room for, the others on the host."""

    def __init__(self, executor: Executor, case: Case) -> None:
        epoch = executor._epoch  # Contexts are set, not computed.
        assert epoch is not None
        self._executor, self._epoch = executor, epoch
        self.context_tokens = case.mean_context_tokens
        blocks_each = -(-(self.context_tokens + 1) // BLOCK_TOKENS)
        host_blocks = epoch.host.num_blocks if epoch.host else 0
        num_gpu = executor.num_gpu_blocks() // blocks_each
        num_host = min(host_blocks // blocks_each, case.limits.max_sequences - num_gpu)
        self.on_gpu = tuple(range(num_gpu))
        self.on_host = tuple(range(num_gpu, num_gpu + num_host))
        new = [
            NewSequence(ids[i], (1,), tier, tuple(range(i * blocks_each, (i + 1) * blocks_each)))
            for ids, tier in ((self.on_gpu, Tier.GPU), (self.on_host, Tier.HOST))
            for i in range(len(ids))
        ]
        self._run(Mode.GPU_ONLY, new_sequences=tuple(new))
        self._slots = epoch.table.slots((*self.on_gpu, *self.on_host))
        self._next_layer = 0

    def run(self, mode: Mode, load: Load, trace: bool = False) -> IterationResult:
        """One iteration over contexts of the same length as ever."""
        self._epoch.table.computed_tokens[self._slots] = self.context_tokens - 1
        first, second = self.on_host[: load.in_first], self.on_host[load.in_first : load.on_host]
        batch = SubBatch(gpu_decodes=self.on_gpu, cpu_decodes=first)
        if mode is Mode.ASYMMETRIC:
            return self._run(mode, trace, sub_batches=(batch, SubBatch(cpu_decodes=second)))
        if mode is not Mode.DECOUPLED:
            return self._run(mode, trace, sub_batches=(batch,))
        num_layers = self._executor.decoder.spec.num_layers
        step = CohortStep(second, self._next_layer, min(load.cohort_layers, num_layers - self._next_layer))
        self._next_layer = (self._next_layer + step.num_layers) % num_layers
        return self._run(mode, trace, sub_batches=(batch,), cohort=step)

    def end_step(self, load: Load) -> None:
        """Of a cohort, so that another mode may follow."""
        while self._next_layer:
            self.run(Mode.DECOUPLED, load)

    def step_s(self, mode: Mode, load: Load) -> float:
        """Seconds of one iteration, of a cohort's step the mean of its iterations."""
        results = [self.run(mode, load)]
        while self._next_layer:
            results.append(self.run(mode, load))
        assert sum(len(result.tokens) for result in results) == round(load.tokens * len(results))
        return statistics.fmean(result.timings.total_ns / 1e9 for result in results)

    def _run(self, mode: Mode, trace: bool = False, **work: object) -> IterationResult:
        number = self._epoch.last_iteration + 1
        plan = IterationPlan(self._epoch.number, number, mode, trace=trace, **work)  # type: ignore[arg-type]
        result = self._executor.run(plan)
        if result.error is not None:
            raise RuntimeError(f"{mode.value}: {result.error_message}")
        return result
