"""Predicts from the tables that the executor measured at start-up."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

from planner_svc.estimator.estimator import EMPTY_LOAD, SubBatchLoad
from planner_svc.estimator.interpolation import Curve, Surface
from planner_svc.estimator.tables import DecodePoint, LinearPoint, OperationTables
from planner_svc.estimator.terms import Factors, Terms
from planner_svc.estimator.timeline import Timeline


class _Layer(NamedTuple):
    """Seconds of one layer with one or two sub-batches."""

    gpu_s: float
    """The GPU's work, as slow as it is beside the CPU's."""
    cpu_wait_s: float
    overlap_s: float
    """In which both would work if neither slowed the other."""


class TableEstimator:
    """An Estimator over OperationTables."""

    def __init__(self, tables: OperationTables, num_layers: int) -> None:
        self._num_layers = num_layers
        self._linear = _curve(tables.linear)
        self._weights_s = self._linear(1) if self._linear else 0.0
        self._prefill = (
            Surface((p.chunk_tokens, p.past_tokens, p.seconds) for p in tables.prefill) if tables.prefill else None
        )
        self._gpu_decode = _decode_surface(tables.gpu_decode)
        self._cpu_decode = _decode_surface(tables.cpu_decode)
        self._cpu_copy = _curve(tables.cpu_copy)
        self._cpu_signal_s = tables.cpu_signal_s
        self._head = _curve(tables.head)
        self._s_per_swap_byte = 1 / tables.swap_bytes_per_s if tables.swap_bytes_per_s > 0 else 0.0
        self._overhead_s = max(0.0, tables.iteration_s)
        self._factors = Factors()

    def calibrated(self, factors: Factors) -> Self:
        """A copy that reads `factors`."""
        other = copy.copy(self)
        other._factors = factors
        return other

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
        return self._factors.cpu_decode * _decode_s(self._cpu_decode, num_sequences, context_tokens)

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
    ) -> float:
        """Layers, head, swaps, which the executor makes before the layers, and a constant."""
        layer = self._layer(first, second)
        return (
            self._num_layers * (layer.gpu_s + layer.cpu_wait_s)
            + self.head_s(first.num_outputs + second.num_outputs)
            + self.swap_s(swap_out_bytes + swap_in_bytes)
            + self._factors.overhead * self._overhead_s
        )

    def _layer(self, first: SubBatchLoad, second: SubBatchLoad) -> _Layer:
        """One batch: linear 0, then the GPU's attention beside the CPU's.

        Two sub-batches: each side works through its queue and may run ahead of the other by one part, so a layer takes
        as long as the longest cycle of what waits for what (gpu_svc/pipeline.py): all of the GPU's work, all of the
        CPU's, or one sub-batch's own way through both.
        """
        linear0 = self.linear_s(first.num_tokens) + self._cpu_copy_s(first.num_cpu_decodes)
        attention_s = self.gpu_decode_s(first.num_gpu_decodes, first.gpu_context_tokens)
        for load in (first, second):
            for chunk, past in load.prefill_chunks:
                attention_s += self.prefill_s(chunk, past)
        cpu0 = self.cpu_decode_s(first.num_cpu_decodes, first.cpu_context_tokens)
        contention = self._factors.contention
        if second.num_tokens == 0:
            overlap_s = min(attention_s, cpu0)
            attention_s += contention * overlap_s
            return _Layer(linear0 + attention_s, max(0.0, cpu0 - attention_s), overlap_s)
        linear1 = self.linear_s(second.num_tokens) + self._cpu_copy_s(second.num_cpu_decodes)
        cpu1 = self.cpu_decode_s(second.num_cpu_decodes, second.cpu_context_tokens)
        gpu_s = linear0 + linear1 + attention_s
        overlap_s = min(gpu_s, cpu0 + cpu1)
        gpu_s += contention * overlap_s
        longest_s = max(cpu0 + cpu1, cpu0 + linear0 if cpu0 else 0.0, cpu1 + linear1 if cpu1 else 0.0)
        return _Layer(gpu_s, max(0.0, longest_s - gpu_s), overlap_s)

    def terms(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
    ) -> Terms:
        """The same iteration by its parts."""
        loads = [load for load in (first, second) if load.num_tokens]
        layer = self._layer(first, second)
        linear_s = [self._linear_parts_s(load.num_tokens) for load in loads]
        prefill_s = sum(self.prefill_s(*chunk) for load in loads for chunk in load.prefill_chunks)
        copy_s = sum(self._cpu_copy_s(load.num_cpu_decodes) for load in loads)
        cpu_s = sum(self._cpu_attention_s(load.num_cpu_decodes, load.cpu_context_tokens) for load in loads)
        num_layers = self._num_layers
        return Terms(
            weights_s=num_layers * sum(weights_s for weights_s, _ in linear_s),
            tokens_s=num_layers * sum(tokens_s for _, tokens_s in linear_s),
            prefill_s=num_layers * prefill_s,
            gpu_decode_s=num_layers * self.gpu_decode_s(first.num_gpu_decodes, first.gpu_context_tokens),
            overhead_s=num_layers * copy_s + self._factors.overhead * self._overhead_s,
            overlap_s=num_layers * layer.overlap_s,
            cpu_wait_s=num_layers * layer.cpu_wait_s,
            cpu_decode_s=num_layers * cpu_s,
            head_s=self.head_s(first.num_outputs + second.num_outputs),
            swap_s=self.swap_s(swap_out_bytes + swap_in_bytes),
        )

    def timeline(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
    ) -> Timeline:
        """The same iteration as how long each processor and each way of the link works in it."""
        terms = self.terms(first, second, swap_out_bytes, swap_in_bytes)
        return Timeline(
            total_s=self.iteration_s(first, second, swap_out_bytes, swap_in_bytes),
            gpu_s=terms.weights_s + terms.tokens_s + terms.prefill_s + terms.gpu_decode_s + terms.head_s,
            cpu_s=terms.cpu_decode_s,
            link_out_s=self.swap_s(swap_out_bytes),
            link_in_s=self.swap_s(swap_in_bytes),
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
