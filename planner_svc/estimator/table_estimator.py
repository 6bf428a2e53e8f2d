"""Predicts from the tables that the executor measured at start-up."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from planner_svc.estimator.cpu_layers import PassSeconds, timeline
from planner_svc.estimator.estimator import CohortLoad, IterationLoad, SubBatchLoad, pools_s, slowest_pool_s
from planner_svc.estimator.interpolation import Curve, Surface
from planner_svc.estimator.tables import DecodePoint, LinearPoint, OperationTables, PrefillPoint
from planner_svc.estimator.terms import Factors, Terms
from planner_svc.estimator.timeline import Timeline
from svc_common.policy import ExecutionPolicy

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

    def __init__(self, tables: OperationTables, num_layers: int, policy: ExecutionPolicy | None = None) -> None:
        """`policy`: under which they were measured; None: all layers on the GPU."""
        self.num_layers = num_layers
        self._prefill_cpu_layers = policy.prefill_cpu_layers if policy else 0
        self._decode_cpu_layers = policy.decode_cpu_layers if policy else 0
        self.cpu_scales = defaultdict[int, float](lambda: 1.0)
        """By host pool, on its attention, where other threads compute than those that were measured."""
        self._pool_factors = dict(enumerate(tables.cpu_pool_factors))
        self._linear = _curve(tables.linear)
        self._weights_s = self._linear(1) if self._linear else 0.0
        self._prefill = _prefill_surface(tables.prefill)
        self._cpu_linear = _curve(tables.cpu_linear)
        self._cpu_prefill = _prefill_surface(tables.cpu_prefill)
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
        """What calibrated copies share what is streamed with."""

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

    def cpu_decode_s(self, num_sequences: int, context_tokens: int, pool: int = 0) -> float:
        """Of one layer."""
        if num_sequences <= 0:
            return 0.0
        return self._cpu_attention_s(num_sequences, context_tokens, pool) + self._cpu_signal_s

    def _cpu_attention_s(self, num_sequences: int, context_tokens: int, pool: int = 0) -> float:
        scale = self._factors.cpu_pool(pool) * self._pool_factors.get(pool, 1.0) * self.cpu_scales[pool]
        return scale * _decode_s(self._cpu_decode, num_sequences, context_tokens)

    def _cpu_s(self, load: SubBatchLoad) -> float:
        return slowest_pool_s(self, load.num_cpu_decodes, load.cpu_context_tokens, load.cpu_pools)

    def _cpu_copy_s(self, num_sequences: int) -> float:
        """Of one layer: q, k and v to the CPU and its answer back."""
        return self._factors.overhead * self._cpu_copy(num_sequences) if self._cpu_copy and num_sequences > 0 else 0.0

    def head_s(self, num_outputs: int) -> float:
        """Of one iteration."""
        return self._factors.head * self._head(num_outputs) if self._head and num_outputs > 0 else 0.0

    def swap_s(self, num_bytes: int) -> float:
        """Of all layers."""
        return self._factors.swap * self._s_per_swap_byte * num_bytes

    def iteration_s(self, load: IterationLoad) -> float:
        """Layers, head, swaps, which the executor makes before the layers, and a constant."""
        layers = self._layers(load.first, load.second, load.cohort)
        beside_s = (
            self.head_s(load.num_outputs)
            + self.swap_s(load.swap_out_bytes + load.swap_in_bytes)
            + self._factors.overhead * self._overhead_s
        )
        layers_s = layers.gpu_s + layers.cpu_wait_s
        return layers_s + beside_s + self._weight_wait_s(layers_s, beside_s, load)

    def _weight_wait_s(self, layers_s: float, beside_s: float, load: IterationLoad) -> float:
        """What streaming takes longer than the work that hides it.

        A streamed layer takes the longer of its computation and its way over the link. While layers that stay on the
        device are computed, and beside the layers, the next two come (gpu_svc/weight_stream.py). A cohort beside a
        batch keeps one of the two buffers, so that nothing hides behind the other.
        """
        first, second, cohort = load.first, load.second, load.cohort
        stream_s, num_layers = self._base._stream_s, self._base._streamed_layers
        has_batch = first.num_tokens > 0
        if not stream_s or not (has_batch or cohort.num_layers):
            return 0.0
        if not (first.prefill_chunks or second.prefill_chunks):
            # Layers that the CPU computes for decodes are not needed then.
            num_needed = num_layers - min(num_layers, self._decode_cpu_layers - self._prefill_cpu_layers)
            stream_s, num_layers = stream_s * num_needed / num_layers, num_needed
        if not stream_s:
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
        if self._decode_cpu_layers:
            return self._above_cpu_layers(first, second)
        num_layers = self.num_layers
        linear0 = self.linear_s(first.num_tokens) + self._cpu_copy_s(first.num_cpu_decodes)
        attention_s = self.gpu_decode_s(first.num_gpu_decodes, first.gpu_context_tokens)
        for load in (first, second):
            for chunk, past in load.prefill_chunks:
                attention_s += self.prefill_s(chunk, past)
        cpu0 = self._cpu_s(first)
        contention = self._factors.contention
        if second.num_tokens == 0:
            if cohort.num_layers:
                return self._beside_cohort(linear0 + attention_s, cohort)
            overlap_s = min(attention_s, cpu0)
            attention_s += contention * overlap_s
            wait_s = max(0.0, cpu0 - attention_s)
            return _Layers(num_layers * (linear0 + attention_s), num_layers * wait_s, num_layers * overlap_s)
        linear1 = self.linear_s(second.num_tokens) + self._cpu_copy_s(second.num_cpu_decodes)
        cpu1 = self._cpu_s(second)
        gpu_s = linear0 + linear1 + attention_s
        overlap_s = min(gpu_s, cpu0 + cpu1)
        gpu_s += contention * overlap_s
        longest_s = max(cpu0 + cpu1, cpu0 + linear0 if cpu0 else 0.0, cpu1 + linear1 if cpu1 else 0.0)
        return _Layers(num_layers * gpu_s, num_layers * max(0.0, longest_s - gpu_s), num_layers * overlap_s)

    def _above_cpu_layers(self, first: SubBatchLoad, second: SubBatchLoad) -> _Layers:
        """Either sub-batch by itself in the upper layers, while the CPU computes the lower ones."""
        passes, upper = [], []
        for load in (first, second):
            layer = self._upper_layer(load)
            passes.append(self._pass_s(load, layer))
            upper.append(layer)
        line = timeline(*passes)
        num_upper = self.num_layers - self._decode_cpu_layers
        attention_wait_s = num_upper * sum(layer.cpu_wait_s for layer in upper)
        overlap_s = line.overlap_s + num_upper * sum(layer.overlap_s for layer in upper)
        gpu_s = line.gpu_s - attention_wait_s
        gpu_s += self._factors.contention * overlap_s
        return _Layers(gpu_s, line.wait_s + attention_wait_s, overlap_s)

    def _upper_layer(self, load: SubBatchLoad) -> _Layers:
        """One layer of a sub-batch by itself."""
        linear_s = self.linear_s(load.num_tokens) + self._cpu_copy_s(load.num_cpu_decodes)
        attention_s = self.gpu_decode_s(load.num_gpu_decodes, load.gpu_context_tokens)
        attention_s += sum(self.prefill_s(*chunk) for chunk in load.prefill_chunks)
        cpu_s = self.cpu_decode_s(load.num_cpu_decodes, load.cpu_context_tokens)
        return _Layers(linear_s + attention_s, max(0.0, cpu_s - attention_s), min(attention_s, cpu_s))

    def _pass_s(self, load: SubBatchLoad, upper: _Layers) -> PassSeconds:
        for_prompts, for_decodes = self._prefill_cpu_layers, self._decode_cpu_layers
        num_upper = self.num_layers - for_decodes
        upper_s = num_upper * (upper.gpu_s + upper.cpu_wait_s)
        if for_prompts == for_decodes:
            return PassSeconds(cpu_last_s=for_decodes * self._cpu_layer_s(load), gpu_upper_s=upper_s)
        prompts = SubBatchLoad(prefill_chunks=load.prefill_chunks)
        decodes = replace(load, prefill_chunks=())
        prompts_s = self.linear_s(prompts.num_tokens) + sum(self.prefill_s(*chunk) for chunk in load.prefill_chunks)
        return PassSeconds(
            cpu_prompts_s=for_prompts * self._cpu_layer_s(prompts),
            cpu_last_s=for_decodes * self._cpu_layer_s(decodes),
            gpu_prompts_s=(for_decodes - for_prompts) * prompts_s,
            gpu_upper_s=upper_s,
        )

    def _cpu_layer_s(self, load: SubBatchLoad) -> float:
        """One CPU layer of prompts and decodes on either tier: their KV there lies in host memory."""
        if load.num_tokens == 0 or not self._cpu_linear:
            return 0.0
        scale = self._factors.cpu_decode * self.cpu_scales[0]
        seconds = scale * self._cpu_linear(load.num_tokens)
        if self._cpu_prefill:
            seconds += scale * sum(self._cpu_prefill(*chunk) for chunk in load.prefill_chunks)
        num_decodes = load.num_gpu_decodes + load.num_cpu_decodes
        return seconds + self._cpu_attention_s(num_decodes, load.gpu_context_tokens + load.cpu_context_tokens)

    def _beside_cohort(self, layer_s: float, cohort: CohortLoad) -> _Layers:
        """Of the batch's L layers, floor(L / m) or one more lie beside the attention of each of the cohort's m.

        See gpu_svc/pipeline.py: sum over the cohort's layers of linear + max{attention, their number * layer}.
        """
        linear_s = self.linear_s(cohort.num_sequences) + self._cpu_copy_s(cohort.num_sequences)
        attention_s = slowest_pool_s(self, cohort.num_sequences, cohort.context_tokens, cohort.cpu_pools)
        overlap_s = min(self.num_layers * layer_s, cohort.num_layers * attention_s)
        layer_s += self._factors.contention * overlap_s / self.num_layers
        num_beside, num_longer = divmod(self.num_layers, cohort.num_layers)
        num_shorter = cohort.num_layers - num_longer
        wait_s = num_longer * max(0.0, attention_s - (num_beside + 1) * layer_s)
        wait_s += num_shorter * max(0.0, attention_s - num_beside * layer_s)
        return _Layers(cohort.num_layers * linear_s + self.num_layers * layer_s, wait_s, overlap_s)

    def terms(self, load: IterationLoad) -> Terms:
        """The same iteration by its parts."""
        first, second, cohort = load.first, load.second, load.cohort
        layers = self._layers(first, second, cohort)
        num_upper = self.num_layers - self._decode_cpu_layers
        num_lower = self._decode_cpu_layers - self._prefill_cpu_layers  # of prompts, on the GPU
        # (layers, tokens in each, sequences attended on the CPU in each)
        passes = [(num_upper, batch.num_tokens, batch.num_cpu_decodes) for batch in (first, second)]
        passes += [(num_lower, sum([chunk for chunk, _ in batch.prefill_chunks]), 0) for batch in (first, second)]
        passes.append((cohort.num_layers, cohort.num_sequences, cohort.num_sequences))
        weights_s = tokens_s = copy_s = 0.0
        for num_layers, num_tokens, num_cpu in passes:
            parts = self._linear_parts_s(num_tokens)
            weights_s += num_layers * parts[0]
            tokens_s += num_layers * parts[1]
            copy_s += num_layers * self._cpu_copy_s(num_cpu)
        cpu_pools_s = pools_s(load, num_upper, self._cpu_attention_s)
        cpu_s = sum(cpu_pools_s)
        if self._decode_cpu_layers:
            for batch in (first, second):
                on_cpu = self._pass_s(batch, self._upper_layer(batch))
                cpu_s += on_cpu.cpu_prompts_s + on_cpu.cpu_last_s
        prefill_s = sum(self.prefill_s(*chunk) for batch in (first, second) for chunk in batch.prefill_chunks)
        head_s = self.head_s(load.num_outputs)
        swap_s = self.swap_s(load.swap_out_bytes + load.swap_in_bytes)
        overhead_s = self._factors.overhead * self._overhead_s
        beside_s = head_s + swap_s + overhead_s
        return Terms(
            weights_s=weights_s,
            tokens_s=tokens_s,
            prefill_s=(num_upper + num_lower) * prefill_s,
            gpu_decode_s=num_upper * self.gpu_decode_s(first.num_gpu_decodes, first.gpu_context_tokens),
            overhead_s=copy_s + overhead_s,
            overlap_s=layers.overlap_s,
            cpu_wait_s=layers.cpu_wait_s,
            cpu_decode_s=cpu_s,
            cpu_pools_s=cpu_pools_s if len(cpu_pools_s) > 1 else (),
            head_s=head_s,
            swap_s=swap_s,
            weight_wait_s=self._weight_wait_s(layers.gpu_s + layers.cpu_wait_s, beside_s, load),
        )

    def timeline(self, load: IterationLoad) -> Timeline:
        """The same iteration as how long each processor and each way of the link works in it."""
        terms = self.terms(load)
        return Timeline(
            total_s=self.iteration_s(load),
            gpu_s=terms.weights_s + terms.tokens_s + terms.prefill_s + terms.gpu_decode_s + terms.head_s,
            cpu_s=terms.cpu_decode_s,
            link_out_s=self.swap_s(load.swap_out_bytes),
            link_in_s=self.swap_s(load.swap_in_bytes) + self._base._stream_s,
        )


def _curve(points: Sequence[LinearPoint]) -> Curve | None:
    return Curve((p.num_tokens, p.seconds) for p in points) if points else None


def _prefill_surface(points: Sequence[PrefillPoint]) -> Surface | None:
    return Surface(((p.chunk_tokens, p.past_tokens, p.seconds) for p in points), per_x=True) if points else None


def _decode_surface(points: Sequence[DecodePoint]) -> Surface | None:
    """Over sequences and mean context: in these, unlike with the total, time rises along both.

    At one total, many short sequences may well be faster than one long one, which fewer threads can share.
    """
    if not points:
        return None
    return Surface((p.num_sequences, p.context_tokens / p.num_sequences, p.seconds) for p in points if p.num_sequences)


def _decode_s(surface: Surface | None, num_sequences: int, context_tokens: int) -> float:
    return surface(num_sequences, context_tokens / num_sequences) if surface and num_sequences > 0 else 0.0
