"""Seconds, bytes and memory of a policy for a mix of requests."""

from collections.abc import Callable
from dataclasses import dataclass

from planner_svc.policy.figures import DecoderFigures
from planner_svc.policy.lanes import Buffers, Lane, Lanes, Segment
from planner_svc.policy.machine import Machine
from planner_svc.policy.memory import MemoryUse, first_held, memory_use
from planner_svc.policy.mix import RequestMix
from planner_svc.policy.work import PhaseWork, decode_work, prefill_work
from svc_common.policy import ExecutionPolicy, PolicyKind

_SETTLED = 2
"""Iterations after which the ring of buffers runs as it will go on running."""


@dataclass(frozen=True, slots=True)
class PhaseEstimate:
    """All iterations of a phase."""

    kind: PolicyKind
    cpu_layers: int
    num_groups: int
    num_iterations: int
    iteration_s: float
    """Of one that follows others like it."""
    total_s: float
    busy_s: dict[Lane, float]
    """How long each lane works in such an iteration."""
    up_bytes: float
    """Over the link in each iteration, to the device."""
    down_bytes: float

    @property
    def binding(self) -> Lane:
        """The lane that works longest."""
        return max(self.busy_s, key=lambda lane: self.busy_s[lane])


@dataclass(frozen=True, slots=True)
class Prediction:
    """A policy for a mix."""

    policy: ExecutionPolicy
    mix: RequestMix
    memory: MemoryUse
    prefill: PhaseEstimate
    decode: PhaseEstimate

    @property
    def ttft_s(self) -> float:
        """Until all prompts have their first token."""
        return self.prefill.total_s

    @property
    def tpot_s(self) -> float:
        return self.decode.iteration_s

    @property
    def total_s(self) -> float:
        """Until all answers are complete."""
        return self.prefill.total_s + self.decode.total_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.mix.num_sequences * self.mix.output_tokens / self.total_s

    @property
    def kinds(self) -> tuple[PolicyKind, PolicyKind]:
        """Of prefill and decode."""
        return self.prefill.kind, self.decode.kind


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration like the others of its phase."""

    segments: tuple[Segment, ...]
    """Those of the iterations before and after that reach into it, too."""
    start_s: float
    end_s: float


class PolicyEstimator:
    """Of one model on one machine."""

    def __init__(self, model: DecoderFigures, machine: Machine, *, warm: bool = False) -> None:
        """`warm`: prompts and decodes like these ran before, so that the buffers hold what those left."""
        self.model = model
        self.machine = machine
        self._warm = warm

    def memory(self, policy: ExecutionPolicy, mix: RequestMix) -> MemoryUse:
        return memory_use(self.model, self.machine, policy, mix)

    def predict(self, policy: ExecutionPolicy, mix: RequestMix) -> Prediction:
        """Whether its memory fits or not. Raises ValueError for a policy that cannot be."""
        self.check(policy)
        memory = self.memory(policy, mix)
        num_host = memory.num_host_sequences
        return Prediction(policy, mix, memory, self.prefill(policy, mix, num_host), self.decode(policy, mix, num_host))

    def check(self, policy: ExecutionPolicy) -> None:
        """Raises ValueError for a policy that the model cannot have or the executor does not run."""
        policy.check(self.model.num_layers)
        if policy.prefill_cpu_layers > policy.decode_cpu_layers:
            raise ValueError(
                f"prefill_cpu_layers must be at most decode_cpu_layers, {policy.decode_cpu_layers}, "
                f"is {policy.prefill_cpu_layers}"
            )

    def prefill(self, policy: ExecutionPolicy, mix: RequestMix, num_host_sequences: int) -> PhaseEstimate:
        """Of all prompts, in iterations of equal size."""
        return self._phase(
            policy,
            policy.prefill_cpu_layers,
            mix.prefill_tokens,
            mix.num_prefill_iterations,
            self._buffers(policy),
            lambda groups: prefill_work(self.model, self.machine, policy, mix, num_host_sequences, groups),
        )

    def _buffers(self, policy: ExecutionPolicy) -> Buffers:
        """Before the first prompts. A prefill brings its first layers again while it ends; decodes that stream others
        put those in their place, such as stream none leave them (gpu_svc/weight_stream.py).
        """
        if not self._warm:
            return Buffers.EMPTY
        if policy.prefill_cpu_layers == policy.decode_cpu_layers:
            return Buffers.RUNNING
        streams_decodes = first_held(self.model.num_layers, policy) > policy.decode_cpu_layers
        return Buffers.EMPTY if streams_decodes else Buffers.FIRST

    def decode(self, policy: ExecutionPolicy, mix: RequestMix, num_host_sequences: int) -> PhaseEstimate:
        """Of all tokens but the first ones."""
        return self._phase(
            policy,
            policy.decode_cpu_layers,
            mix.num_sequences,
            mix.num_decode_iterations,
            Buffers.RUNNING,
            lambda groups: decode_work(self.model, self.machine, policy, mix, num_host_sequences, groups),
        )

    def floor_s(self, policy: ExecutionPolicy, mix: RequestMix) -> float:
        """Which `total_s` is never less than: that of the busiest lane of each phase."""
        num_host = self.memory(policy, mix).num_host_sequences
        prefill = prefill_work(self.model, self.machine, policy, mix, num_host, 1)
        decode = decode_work(self.model, self.machine, policy, mix, num_host, 1)
        prefill_s = mix.num_prefill_iterations * max(prefill.busy_s.values())
        return prefill_s + mix.num_decode_iterations * max(decode.busy_s.values())

    def timeline(self, prediction: Prediction, *, of_decode: bool) -> Timeline:
        """Of an iteration in the middle of a phase; of prefill the first one."""
        phase = prediction.decode if of_decode else prediction.prefill
        make = decode_work if of_decode else prefill_work
        num_host = prediction.memory.num_host_sequences
        work = make(self.model, self.machine, prediction.policy, prediction.mix, num_host, phase.num_groups)
        records: list[Segment] = []
        lanes = Lanes(work.iteration, records)
        ends = [0.0] + [lanes.run() for _ in range(_SETTLED + 1)]
        start_s, end_s = ends[_SETTLED : _SETTLED + 2] if of_decode else ends[:2]
        shown = tuple(item for item in records if item.end_s > start_s and item.start_s < end_s)
        return Timeline(shown, start_s, end_s)

    def _phase(
        self,
        policy: ExecutionPolicy,
        cpu_layers: int,
        num_tokens: float,
        num_iterations: int,
        buffers: Buffers,
        make: Callable[[int], PhaseWork],
    ) -> PhaseEstimate:
        """With one group or, where both processors have layers and the batch can be halved, two: the faster.

        `buffers`: before the first of its iterations.
        """
        num_layers = self.model.num_layers
        can_split = 0 < cpu_layers < num_layers and num_tokens >= 2
        best: PhaseEstimate | None = None
        for num_groups in (1, 2) if can_split else (1,):
            work = make(num_groups)
            lanes = Lanes(work.iteration, buffers=buffers)
            first_s = settled_s = lanes.run()
            if work.iteration.first_held > cpu_layers:
                ends = [lanes.run() for _ in range(_SETTLED)]
                settled_s = ends[-1] - ends[-2]
            total_s = num_iterations * settled_s
            if buffers is not Buffers.RUNNING:
                total_s += first_s - settled_s
            if best is None or total_s < best.total_s:
                best = PhaseEstimate(
                    kind=policy.kind(cpu_layers, num_layers),
                    cpu_layers=cpu_layers,
                    num_groups=num_groups,
                    num_iterations=num_iterations,
                    iteration_s=settled_s,
                    total_s=total_s,
                    busy_s=work.busy_s,
                    up_bytes=work.up_bytes,
                    down_bytes=work.down_bytes,
                )
        assert best is not None
        return best
