"""Finds the policy that answers a mix soonest, and the best of each kind beside it.

Candidates are all numbers of CPU layers for decode; with each, for resident layers, what memory allows with all KV on
the GPU, with none, and in between; for prefill the corners, and then steps around the best. What cannot beat the best
of its kind, by the busiest lane alone, is not run through the lanes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from planner_svc.policy.estimate import PolicyEstimator, Prediction
from planner_svc.policy.memory import NUM_BUFFERS
from planner_svc.policy.mix import RequestMix
from svc_common.policy import ExecutionPolicy, PolicyKind

Kinds = tuple[PolicyKind, PolicyKind]
"""Of prefill and decode."""
_RESIDENT_STEPS = 4
"""Between all KV on the GPU and none."""


class NoPolicyError(Exception):
    """Nothing fits the machine's memory. The text says what is lacking."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the search found for a mix."""

    best: Prediction
    by_kind: tuple[Prediction, ...]
    """The best of each pair of kinds that fits, the fastest first; `best` is the first."""


class PolicySearch:
    """Over all policies of one model on one machine."""

    def __init__(self, estimator: PolicyEstimator) -> None:
        self.estimator = estimator
        self._num_layers = estimator.model.num_layers

    def compare(self, mix: RequestMix) -> Comparison:
        """Raises NoPolicyError where none fits."""
        found: dict[Kinds, Prediction] = {}
        for decode_cpu in range(self._num_layers + 1):
            for prefill_cpu in sorted({0, decode_cpu}):
                for resident in self._resident_layers(prefill_cpu, decode_cpu, mix):
                    self._try(ExecutionPolicy(resident, prefill_cpu, decode_cpu), mix, found)
        for kinds in list(found):
            self._refine(kinds, mix, found)
        if not found:
            raise NoPolicyError(self._lacking(mix))
        ordered = sorted(found.values(), key=lambda item: item.total_s)
        return Comparison(ordered[0], tuple(ordered))

    def _try(self, policy: ExecutionPolicy, mix: RequestMix, found: dict[Kinds, Prediction]) -> bool:
        """Whether it fits and is the best of its kinds so far, which it then is in `found`."""
        num_layers = self._num_layers
        kinds = policy.kind(policy.prefill_cpu_layers, num_layers), policy.kind(policy.decode_cpu_layers, num_layers)
        best = found.get(kinds)
        if best is not None and self.estimator.floor_s(policy, mix) >= best.total_s:
            return False
        if not self.estimator.memory(policy, mix).fits(self.estimator.machine):
            return False
        prediction = self.estimator.predict(policy, mix)
        if best is not None and prediction.total_s >= best.total_s:
            return False
        found[kinds] = prediction
        return True

    def _refine(self, kinds: Kinds, mix: RequestMix, found: dict[Kinds, Prediction]) -> None:
        """Steps from the best of the kinds in all three numbers, ever smaller, as long as one helps."""
        step = max(1, self._num_layers // 4)
        while step:
            if not any(self._try(policy, mix, found) for policy in self._around(found[kinds].policy, step)):
                step //= 2

    def _around(self, policy: ExecutionPolicy, step: int) -> Iterator[ExecutionPolicy]:
        numbers = (policy.resident_layers, policy.prefill_cpu_layers, policy.decode_cpu_layers)
        moves = ((0, 1, 0), (0, -1, 0), (1, 0, 0), (-1, 0, 0), (1, 0, -1), (1, -1, -1), (0, 1, 1), (0, -1, -1))
        for move in moves:
            resident, prefill, decode = (value + step * way for value, way in zip(numbers, move, strict=True))
            if 0 <= prefill <= decode <= self._num_layers and 0 <= resident <= self._num_layers - prefill:
                yield ExecutionPolicy(resident, prefill, decode)

    def _resident_layers(self, prefill_cpu: int, decode_cpu: int, mix: RequestMix) -> Iterator[int]:
        """Numbers to try: all that some phase computes on the GPU, which then needs no buffers, or enough fewer to
        stream; of these more are never slower while all KV lies on the GPU, or none.
        """
        most = self._num_layers - prefill_cpu
        yield most
        most -= NUM_BUFFERS + 1
        with_kv = max(0, self._most(prefill_cpu, decode_cpu, mix, most, needs_kv=True))
        without = self._most(prefill_cpu, decode_cpu, mix, most, needs_kv=False)
        if without >= 0:
            span = without - with_kv
            yield from sorted({with_kv + span * place // _RESIDENT_STEPS for place in range(_RESIDENT_STEPS + 1)})

    def _most(self, prefill_cpu: int, decode_cpu: int, mix: RequestMix, most: int, *, needs_kv: bool) -> int:
        """Resident layers, up to `most`, that fit the GPU beside all KV, or what of it has room; -1: not even none."""
        low, high = -1, most
        while low < high:
            middle = (low + high + 1) // 2
            use = self.estimator.memory(ExecutionPolicy(middle, prefill_cpu, decode_cpu), mix)
            fits = use.gpu.total <= self.estimator.machine.gpu.memory_bytes
            if fits and not (needs_kv and use.num_host_sequences):
                low = middle
            else:
                high = middle - 1
        return low

    def _lacking(self, mix: RequestMix) -> str:
        """What the least demanding policies need, and of which memory there is less."""
        machine, num_layers = self.estimator.machine, self._num_layers
        least = self.estimator.memory(ExecutionPolicy(0, num_layers, num_layers), mix)
        if least.gpu.total > machine.gpu.memory_bytes:
            return (
                f"GPU memory: even with all layers on the CPU {least.gpu.total:,} bytes are needed (vocabulary, "
                f"activations and buffers), there are {machine.gpu.memory_bytes:,}"
            )
        spread = min(
            (self.estimator.memory(ExecutionPolicy(resident), mix) for resident in range(num_layers + 1)),
            key=lambda use: max(0, use.gpu.total - machine.gpu.memory_bytes) + use.host.total,
        )
        return (
            f"memory: {mix.num_sequences} sequences of {mix.sequence_tokens} tokens and the weights need "
            f"{spread.host.total:,} bytes of host memory beside {spread.gpu.total:,} on the GPU, there are "
            f"{machine.cpu.memory_bytes:,} and {machine.gpu.memory_bytes:,}"
        )
