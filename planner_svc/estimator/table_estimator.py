"""Predicts from the tables that the executor measured at start-up."""

from collections.abc import Sequence

from planner_svc.estimator.estimator import EMPTY_LOAD, NO_COHORT, CohortLoad, SubBatchLoad
from planner_svc.estimator.interpolation import Curve, Surface
from planner_svc.estimator.tables import DecodePoint, LinearPoint, OperationTables


class TableEstimator:
    """An Estimator over OperationTables. Uncalibrated: `Calibration` corrects what it says."""

    def __init__(self, tables: OperationTables, num_layers: int) -> None:
        self.num_layers = num_layers
        self.cpu_scale = 1.0
        """On attention on the CPU, where other threads compute than those that were measured."""
        self._linear = _curve(tables.linear)
        self._prefill = (
            Surface((p.chunk_tokens, p.past_tokens, p.seconds) for p in tables.prefill) if tables.prefill else None
        )
        self._gpu_decode = _decode_surface(tables.gpu_decode)
        self._cpu_decode = _decode_surface(tables.cpu_decode)
        self._head = _curve(tables.head)
        self._s_per_swap_byte = 1 / tables.swap_bytes_per_s if tables.swap_bytes_per_s > 0 else 0.0
        self._overhead_s = max(0.0, tables.iteration_s)

    def linear_s(self, num_tokens: int) -> float:
        """Of one layer."""
        return self._linear(num_tokens) if self._linear and num_tokens > 0 else 0.0

    def prefill_s(self, chunk_tokens: int, past_tokens: int) -> float:
        """Of one layer."""
        return self._prefill(chunk_tokens, past_tokens) if self._prefill and chunk_tokens > 0 else 0.0

    def gpu_decode_s(self, num_sequences: int, context_tokens: int) -> float:
        """Of one layer."""
        return _decode_s(self._gpu_decode, num_sequences, context_tokens)

    def cpu_decode_s(self, num_sequences: int, context_tokens: int) -> float:
        """Of one layer."""
        return self.cpu_scale * _decode_s(self._cpu_decode, num_sequences, context_tokens)

    def head_s(self, num_outputs: int) -> float:
        """Of one iteration."""
        return self._head(num_outputs) if self._head and num_outputs > 0 else 0.0

    def swap_s(self, num_bytes: int) -> float:
        """Of all layers."""
        return num_bytes * self._s_per_swap_byte

    def iteration_s(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
        cohort: CohortLoad = NO_COHORT,
    ) -> float:
        """One batch: L * (lin0 + max{pre0 + gdec0, cpu0}); the GPU's attention runs beside the CPU's.

        Two, after NEO (MLSys 2025), section 4, the second without GPU decodes; it attends its prompts beside the
        first's: L * (max{lin0 + pre0 + pre1, cpu1} + max{lin1 + gdec0, cpu0}). The executor copies before the layers.
        """
        linear_s = self.linear_s(first.num_tokens)
        chunks = (*first.prefill_chunks, *second.prefill_chunks)
        prefill_s = sum(self.prefill_s(chunk, past) for chunk, past in chunks)
        gpu_decode_s = self.gpu_decode_s(first.num_gpu_decodes, first.gpu_context_tokens)
        cpu_s = self.cpu_decode_s(first.num_cpu_decodes, first.cpu_context_tokens)
        if second.num_tokens == 0:
            layers_s = self._beside_cohort_s(linear_s + max(prefill_s + gpu_decode_s, cpu_s), cohort)
        else:
            second_linear_s = self.linear_s(second.num_tokens)
            second_cpu_s = self.cpu_decode_s(second.num_cpu_decodes, second.cpu_context_tokens)
            layer_s = max(linear_s + prefill_s, second_cpu_s) + max(second_linear_s + gpu_decode_s, cpu_s)
            layers_s = self.num_layers * layer_s
        return (
            layers_s
            + self.head_s(first.num_outputs + second.num_outputs + cohort.num_outputs)
            + self.swap_s(swap_out_bytes + swap_in_bytes)
            + self._overhead_s
        )

    def _beside_cohort_s(self, layer_s: float, cohort: CohortLoad) -> float:
        """Of the batch's L layers, floor(L / m) or one more lie beside the attention of each of the cohort's m.

        See gpu_svc/pipeline.py: sum over the cohort's layers of linear + max{attention, their number * layer}.
        """
        if cohort.num_layers == 0:
            return self.num_layers * layer_s
        linear_s = self.linear_s(cohort.num_sequences)
        attention_s = self.cpu_decode_s(cohort.num_sequences, cohort.context_tokens)
        num_beside, num_longer = divmod(self.num_layers, cohort.num_layers)
        num_shorter = cohort.num_layers - num_longer
        longer_s, shorter_s = max(attention_s, (num_beside + 1) * layer_s), max(attention_s, num_beside * layer_s)
        return cohort.num_layers * linear_s + num_longer * longer_s + num_shorter * shorter_s


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
