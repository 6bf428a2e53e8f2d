"""Predicts from the tables that the executor measured at start-up."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

from planner_svc.estimator.estimator import EMPTY_LOAD, NO_COHORT, CohortLoad, SubBatchLoad
from planner_svc.estimator.interpolation import Curve, Surface
from planner_svc.estimator.tables import DecodePoint, LinearPoint, OperationTables
from planner_svc.estimator.terms import Factors, Terms
from planner_svc.estimator.timeline import Timeline

_LAYERS_AHEAD = 2
"""Streamed layers that may be on the device before they are needed."""


class _Layers(NamedTuple):
    """Seconds of all layers of an iteration."""

    gpu_s: float
    """The GPU's work, as slow as it is beside the CPU's."""
    cpu_wait_s: float
    overlap_s: float
    """In which both would work if neither slowed the other."""


class TableEstimator:
    """An Estimator over OperationTables."""

    def __init__(self, tables: OperationTables, num_layers: int) -> None:
        self.num_layers = num_layers
        self.cpu_scale = 1.0
        """On attention on the CPU, where other threads compute than those that were measured."""
        self._linear = _curve(tables.linear)
        self._weights_s = self._linear(1) if self._linear else 0.0
        self._prefill = (
            Surface(((p.chunk_tokens, p.past_tokens, p.seconds) for p in tables.prefill), per_x=True)
            if tables.prefill
            else None
        )
        self._gpu_decode = _decode_surface(tables.gpu_decode)
        self._cpu_decode = _decode_surface(tables.cpu_decode)
        self._cpu_copy = _curve(tables.cpu_copy)
        self._cpu_signal_s = tables.cpu_signal_s
        self._head = _curve(tables.head)
        self._s_per_swap_byte = 1 / tables.swap_bytes_per_s if tables.swap_bytes_per_s > 0 else 0.0
        self._s_per_weight_byte = 1 / tables.link_bytes_per_s if tables.link_bytes_per_s > 0 else 0.0
        self._streamed_layers = 0
        self._stream_s = 0.0  # of all streamed layers over the link
        self._overhead_s = max(0.0, tables.iteration_s)
        self._factors = Factors()
        self._base = self
        """What calibrated copies share `cpu_scale`, and what is streamed, with."""

    def calibrated(self, factors: Factors) -> Self:
        """A copy that reads `factors`."""
        other = copy.copy(self)
        other._factors = factors
        return other

    def stream(self, num_layers: int, num_bytes: int) -> None:
        """From now on the weights of so many layers, so many bytes together, cross the link in each iteration."""
        self._base._streamed_layers = num_layers
        self._base._stream_s = num_bytes * self._s_per_weight_byte

    def linear_s(self, num_tokens: int) -> float:
        """Of one layer."""
        weights_s, tokens_s = self._linear_parts_s(num_tokens)
        return weights_s + tokens_s

    def _linear_parts_s(self, num_tokens: int) -> tuple[float, float]:
        """What one token takes, and what the others add."""
        if not self._linear or num_tokens <= 0:
            return 0.0, 0.0
        factors = self._factors
        return factors.weights * self._weights_s, factors.tokens * (self._linear(num_tokens) - self._weights_s)

    def prefill_s(self, chunk_tokens: int, past_tokens: int) -> float:
        """Of one layer."""
        if not self._prefill or chunk_tokens <= 0:
            return 0.0
        return self._factors.prefill * self._prefill(chunk_tokens, past_tokens)

    def gpu_decode_s(self, num_sequences: int, context_tokens: int) -> float:
        """Of one layer."""
        return self._factors.gpu_decode * _decode_s(self._gpu_decode, num_sequences, context_tokens)

    def cpu_decode_s(self, num_sequences: int, context_tokens: int) -> float:
        """Of one layer."""
        if num_sequences <= 0:
            return 0.0
        return self._cpu_attention_s(num_sequences, context_tokens) + self._cpu_signal_s

    def _cpu_attention_s(self, num_sequences: int, context_tokens: int) -> float:
        scale = self._factors.cpu_decode * self._base.cpu_scale
        return scale * _decode_s(self._cpu_decode, num_sequences, context_tokens)

    def _cpu_copy_s(self, num_sequences: int) -> float:
        """Of one layer: q, k and v to the CPU and its answer back."""
        return self._factors.overhead * self._cpu_copy(num_sequences) if self._cpu_copy and num_sequences > 0 else 0.0

    def head_s(self, num_outputs: int) -> float:
        """Of one iteration."""
        return self._factors.head * self._head(num_outputs) if self._head and num_outputs > 0 else 0.0

    def swap_s(self, num_bytes: int) -> float:
        """Of all layers."""
        return self._factors.swap * self._s_per_swap_byte * num_bytes

    def iteration_s(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
        cohort: CohortLoad = NO_COHORT,
    ) -> float:
        """Layers, head, swaps, which the executor makes before the layers, and a constant."""
        layers = self._layers(first, second, cohort)
        beside_s = (
            self.head_s(first.num_outputs + second.num_outputs + cohort.num_outputs)
            + self.swap_s(swap_out_bytes + swap_in_bytes)
            + self._factors.overhead * self._overhead_s
        )
        layers_s = layers.gpu_s + layers.cpu_wait_s
        return layers_s + beside_s + self._weight_wait_s(layers_s, beside_s, first.num_tokens > 0, cohort)

    def _weight_wait_s(self, layers_s: float, beside_s: float, has_batch: bool, cohort: CohortLoad) -> float:
        """What streaming takes longer than the work that hides it.

        A streamed layer takes the longer of its computation and its way over the link. While layers that stay on the
        device are computed, and beside the layers, the next two come (gpu_svc/weight_stream.py). A cohort beside a
        batch keeps one of the two buffers, so that nothing hides behind the other.
        """
        stream_s, num_layers = self._base._stream_s, self._base._streamed_layers
        if not stream_s or not (has_batch or cohort.num_layers):
            return 0.0
        if cohort.num_layers:
            of_cohort_s = stream_s * cohort.num_layers / self.num_layers
            if has_batch:
                return stream_s + of_cohort_s
            hidden_s = layers_s * num_layers / self.num_layers
            return max(0.0, of_cohort_s - hidden_s)
        streamed_s = layers_s * num_layers / self.num_layers
        ahead_s = min(_LAYERS_AHEAD * stream_s / num_layers, layers_s - streamed_s + beside_s)
        return max(0.0, stream_s - streamed_s - ahead_s)

    def _layers(self, first: SubBatchLoad, second: SubBatchLoad, cohort: CohortLoad) -> _Layers:
        """One batch: its linear operations, then the GPU's attention beside the CPU's.

        Two sub-batches: each side works through its queue and may run ahead of the other by one part, so a layer takes
        as long as the longest cycle of what waits for what (gpu_svc/pipeline.py): all of the GPU's work, all of the
        CPU's, or one sub-batch's own way through both.
        """
        num_layers = self.num_layers
        linear0 = self.linear_s(first.num_tokens) + self._cpu_copy_s(first.num_cpu_decodes)
        attention_s = self.gpu_decode_s(first.num_gpu_decodes, first.gpu_context_tokens)
        for load in (first, second):
            for chunk, past in load.prefill_chunks:
                attention_s += self.prefill_s(chunk, past)
        cpu0 = self.cpu_decode_s(first.num_cpu_decodes, first.cpu_context_tokens)
        contention = self._factors.contention
        if second.num_tokens == 0:
            if cohort.num_layers:
                return self._beside_cohort(linear0 + attention_s, cohort)
            overlap_s = min(attention_s, cpu0)
            attention_s += contention * overlap_s
            wait_s = max(0.0, cpu0 - attention_s)
            return _Layers(num_layers * (linear0 + attention_s), num_layers * wait_s, num_layers * overlap_s)
        linear1 = self.linear_s(second.num_tokens) + self._cpu_copy_s(second.num_cpu_decodes)
        cpu1 = self.cpu_decode_s(second.num_cpu_decodes, second.cpu_context_tokens)
        gpu_s = linear0 + linear1 + attention_s
        overlap_s = min(gpu_s, cpu0 + cpu1)
        gpu_s += contention * overlap_s
        longest_s = max(cpu0 + cpu1, cpu0 + linear0 if cpu0 else 0.0, cpu1 + linear1 if cpu1 else 0.0)
        return _Layers(num_layers * gpu_s, num_layers * max(0.0, longest_s - gpu_s), num_layers * overlap_s)

    def _beside_cohort(self, layer_s: float, cohort: CohortLoad) -> _Layers:
        """Of the batch's L layers, floor(L / m) or one more lie beside the attention of each of the cohort's m.

        See gpu_svc/pipeline.py: sum over the cohort's layers of linear + max{attention, their number * layer}.
        """
        linear_s = self.linear_s(cohort.num_sequences) + self._cpu_copy_s(cohort.num_sequences)
        attention_s = self.cpu_decode_s(cohort.num_sequences, cohort.context_tokens)
        overlap_s = min(self.num_layers * layer_s, cohort.num_layers * attention_s)
        layer_s += self._factors.contention * overlap_s / self.num_layers
        num_beside, num_longer = divmod(self.num_layers, cohort.num_layers)
        num_shorter = cohort.num_layers - num_longer
        wait_s = num_longer * max(0.0, attention_s - (num_beside + 1) * layer_s)
        wait_s += num_shorter * max(0.0, attention_s - num_beside * layer_s)
        return _Layers(cohort.num_layers * linear_s + self.num_layers * layer_s, wait_s, overlap_s)

    def terms(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
        cohort: CohortLoad = NO_COHORT,
    ) -> Terms:
        """The same iteration by its parts."""
        layers = self._layers(first, second, cohort)
        # (layers, tokens in each, sequences and context attended on the CPU in each)
        passes = [
            (self.num_layers, load.num_tokens, load.num_cpu_decodes, load.cpu_context_tokens)
            for load in (first, second)
        ]
        passes.append((cohort.num_layers, cohort.num_sequences, cohort.num_sequences, cohort.context_tokens))
        weights_s = tokens_s = copy_s = cpu_s = 0.0
        for num_layers, num_tokens, num_cpu, cpu_context in passes:
            parts = self._linear_parts_s(num_tokens)
            weights_s += num_layers * parts[0]
            tokens_s += num_layers * parts[1]
            copy_s += num_layers * self._cpu_copy_s(num_cpu)
            cpu_s += num_layers * self._cpu_attention_s(num_cpu, cpu_context)
        prefill_s = sum(self.prefill_s(*chunk) for load in (first, second) for chunk in load.prefill_chunks)
        head_s = self.head_s(first.num_outputs + second.num_outputs + cohort.num_outputs)
        swap_s, overhead_s = self.swap_s(swap_out_bytes + swap_in_bytes), self._factors.overhead * self._overhead_s
        beside_s = head_s + swap_s + overhead_s
        return Terms(
            weights_s=weights_s,
            tokens_s=tokens_s,
            prefill_s=self.num_layers * prefill_s,
            gpu_decode_s=self.num_layers * self.gpu_decode_s(first.num_gpu_decodes, first.gpu_context_tokens),
            overhead_s=copy_s + overhead_s,
            overlap_s=layers.overlap_s,
            cpu_wait_s=layers.cpu_wait_s,
            cpu_decode_s=cpu_s,
            head_s=head_s,
            swap_s=swap_s,
            weight_wait_s=self._weight_wait_s(layers.gpu_s + layers.cpu_wait_s, beside_s, first.num_tokens > 0, cohort),
        )

    def timeline(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
        cohort: CohortLoad = NO_COHORT,
    ) -> Timeline:
        """The same iteration as how long each processor and each way of the link works in it."""
        terms = self.terms(first, second, swap_out_bytes, swap_in_bytes, cohort)
        return Timeline(
            total_s=self.iteration_s(first, second, swap_out_bytes, swap_in_bytes, cohort),
            gpu_s=terms.weights_s + terms.tokens_s + terms.prefill_s + terms.gpu_decode_s + terms.head_s,
            cpu_s=terms.cpu_decode_s,
            link_out_s=self.swap_s(swap_out_bytes),
            link_in_s=self.swap_s(swap_in_bytes) + self._base._stream_s,
        )


def _curve(points: Sequence[LinearPoint]) -> Curve | None:
    return Curve((p.num_tokens, p.seconds) for p in points) if points else None


def _decode_surface(points: Sequence[DecodePoint]) -> Surface | None:
    """Over sequences and mean context: in these, unlike with the total, time rises along both.

    At one total, many short sequences may well be faster than one long one, which fewer threads can share.
    """
    if not points:
        return None
    return Surface((p.num_sequences, p.context_tokens / p.num_sequences, p.seconds) for p in points if p.num_sequences)


def _decode_s(surface: Surface | None, num_sequences: int, context_tokens: int) -> float:
    return surface(num_sequences, context_tokens / num_sequences) if surface and num_sequences > 0 else 0.0
