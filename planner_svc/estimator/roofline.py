"""Predicts from a machine's figures alone: each operation takes what its bytes or its FLOP take, whichever is more.

Two sub-batches 0 and 1 in a layer, a their attention on the GPU, c on the CPU (NEO, MLSys 2025, section 4):

    stage 1 = max{linear 0 + a1, c1}        stage 2 = max{linear 1 + a0, c0}

The first layer's stage 1 and the last one's stage 2 have nothing from the neighbouring layer beside them.
"""

import copy
from collections.abc import Iterable
from typing import Self

from planner_svc.estimator.estimator import EMPTY_LOAD, SubBatchLoad
from planner_svc.estimator.hardware import HardwareSpec, ModelFigures
from planner_svc.estimator.terms import Factors, Terms
from planner_svc.estimator.timeline import Timeline


class RooflineEstimator:
    """An Estimator of closed formulas."""

    def __init__(self, hardware: HardwareSpec, model: ModelFigures) -> None:
        gpu_bytes_per_s = hardware.gpu_bytes_per_s * hardware.gpu_bandwidth_efficiency
        linear_flops_per_s = hardware.gpu_flops_per_s * hardware.linear_efficiency
        kv_bytes = model.kv_bytes_per_token_layer
        head_parameters = model.vocab_size * model.hidden_size
        self.num_layers = model.num_layers
        self.kv_bytes_per_token = kv_bytes * model.num_layers
        self.linear_floor_s = 2 * model.layer_parameters / gpu_bytes_per_s
        self.linear_token_s = 2 * model.layer_parameters / linear_flops_per_s
        self.launch_s = hardware.launch_s
        attention_flops_per_s = hardware.gpu_flops_per_s * hardware.attention_efficiency
        self._prefill_pair_s = 4 * model.num_q_heads * model.head_dim / attention_flops_per_s
        """For each pair of a token and one that it sees."""
        self._gpu_context_token_s = kv_bytes / gpu_bytes_per_s
        self._cpu_context_token_s = kv_bytes / (hardware.cpu_bytes_per_s * hardware.cpu_bandwidth_efficiency)
        self._cpu_sequence_s = hardware.cpu_sequence_s
        self._cpu_hop_s = hardware.cpu_hop_s
        self._head_floor_s = 2 * head_parameters / gpu_bytes_per_s
        self._head_token_s = 2 * head_parameters / linear_flops_per_s
        self._link_byte_s = 1 / hardware.link_bytes_per_s
        self._iteration_s = hardware.iteration_s
        self._factors = Factors()

    def calibrated(self, factors: Factors) -> Self:
        """A copy that reads `factors`."""
        other = copy.copy(self)
        other._factors = factors
        return other

    def linear_s(self, num_tokens: int) -> float:
        """Of one layer."""
        if num_tokens <= 0:
            return 0.0
        weights_s, tokens_s = self._linear_parts_s(num_tokens)
        return weights_s + tokens_s

    def _linear_parts_s(self, num_tokens: int) -> tuple[float, float]:
        """Reading the weights and launches, and arithmetic: of reading and arithmetic, the longer one counts."""
        factors = self._factors
        floor_s, launch_s = factors.weights * self.linear_floor_s, factors.weights * self.launch_s
        tokens_s = factors.tokens * self.linear_token_s * num_tokens
        return (launch_s, tokens_s) if tokens_s > floor_s else (floor_s + launch_s, 0.0)

    def prefill_s(self, chunk_tokens: int, past_tokens: int) -> float:
        """Of one layer. A chunk's token sees all before the chunk and half of the chunk."""
        return self._factors.prefill * self._prefill_pair_s * chunk_tokens * (past_tokens + chunk_tokens / 2)

    def gpu_decode_s(self, num_sequences: int, context_tokens: int) -> float:
        """Of one layer."""
        return self._factors.gpu_decode * self._gpu_context_token_s * context_tokens

    def cpu_decode_s(self, num_sequences: int, context_tokens: int) -> float:
        """Of one layer."""
        if num_sequences == 0:
            return 0.0
        attention_s = context_tokens * self._cpu_context_token_s + num_sequences * self._cpu_sequence_s
        return self._factors.cpu_decode * attention_s + self._cpu_hop_s

    def head_s(self, num_outputs: int) -> float:
        """Of one iteration. The weights are read whatever the number of outputs."""
        return self._factors.head * (self._head_floor_s + self._head_token_s * num_outputs)

    def swap_s(self, num_bytes: int) -> float:
        """Of all layers, one way."""
        return self._factors.swap * self._link_byte_s * num_bytes

    def iteration_s(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
    ) -> float:
        """Layers and head, and what of the swaps the layers don't hide; both ways of the link at once."""
        layers_s = self._layers_s(first, second)
        swap_out_bytes += self.kv_bytes_per_token * (first.host_prefill_tokens + second.host_prefill_tokens)
        swap_in_bytes += self.kv_bytes_per_token * (first.host_past_tokens + second.host_past_tokens)
        swap_s = self.swap_s(max(swap_out_bytes, swap_in_bytes))
        return max(layers_s, swap_s) + self.head_s(first.num_items + second.num_items) + self._overhead_s()

    def _overhead_s(self) -> float:
        return self._factors.overhead * self._iteration_s

    def terms(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
    ) -> Terms:
        """The same iteration by its parts; the GPU's work is not slowed by the CPU's."""
        loads = [load for load in (first, second) if load.num_tokens]
        linear_s = [self._linear_parts_s(load.num_tokens) for load in loads]
        prefill_s = sum(_prefills_s(self, load.prefill_chunks) for load in loads)
        decode_s = sum(self.gpu_decode_s(load.num_gpu_decodes, load.gpu_context_tokens) for load in loads)
        cpu_loads = [load for load in loads if load.num_cpu_decodes]
        cpu_s = sum(map(self._cpu_attention_s, cpu_loads)) - len(cpu_loads) * self._cpu_hop_s
        gpu_layer_s = sum(map(sum, linear_s)) + prefill_s + decode_s
        layers_s = self._layers_s(first, second)
        swap_out_bytes += self.kv_bytes_per_token * (first.host_prefill_tokens + second.host_prefill_tokens)
        swap_in_bytes += self.kv_bytes_per_token * (first.host_past_tokens + second.host_past_tokens)
        swap_s = self.swap_s(max(swap_out_bytes, swap_in_bytes))
        return Terms(
            weights_s=self.num_layers * sum(weights_s for weights_s, _ in linear_s),
            tokens_s=self.num_layers * sum(tokens_s for _, tokens_s in linear_s),
            prefill_s=self.num_layers * prefill_s,
            gpu_decode_s=self.num_layers * decode_s,
            overhead_s=self._overhead_s(),
            cpu_wait_s=max(0.0, layers_s - self.num_layers * gpu_layer_s),
            cpu_decode_s=self.num_layers * cpu_s,
            head_s=self.head_s(first.num_items + second.num_items),
            swap_s=swap_s,
            swap_hidden_s=layers_s,
        )

    def timeline(
        self,
        first: SubBatchLoad,
        second: SubBatchLoad = EMPTY_LOAD,
        swap_out_bytes: int = 0,
        swap_in_bytes: int = 0,
    ) -> Timeline:
        """The same iteration as how long each processor and each way of the link works in it."""
        total_s = self.iteration_s(first, second, swap_out_bytes, swap_in_bytes)
        swap_out_bytes += self.kv_bytes_per_token * (first.host_prefill_tokens + second.host_prefill_tokens)
        swap_in_bytes += self.kv_bytes_per_token * (first.host_past_tokens + second.host_past_tokens)
        gpu_layer_s = sum(self.linear_s(load.num_tokens) + self._gpu_attention_s(load) for load in (first, second))
        cpu_layer_s = sum(self._cpu_attention_s(load) for load in (first, second))
        return Timeline(
            total_s=total_s,
            gpu_s=self.num_layers * gpu_layer_s + self.head_s(first.num_items + second.num_items),
            cpu_s=self.num_layers * cpu_layer_s,
            link_out_s=self.swap_s(swap_out_bytes),
            link_in_s=self.swap_s(swap_in_bytes),
        )

    def _layers_s(self, first: SubBatchLoad, second: SubBatchLoad) -> float:
        linear0, gpu0, cpu0 = (
            self.linear_s(first.num_tokens),
            self._gpu_attention_s(first),
            self._cpu_attention_s(first),
        )
        if second.num_tokens == 0:
            return self.num_layers * (linear0 + max(gpu0, cpu0))
        linear1 = self.linear_s(second.num_tokens)
        gpu1, cpu1 = self._gpu_attention_s(second), self._cpu_attention_s(second)
        stages_s = max(linear0 + gpu1, cpu1) + max(linear1 + gpu0, cpu0)
        ends_s = (linear0 + linear1) / 2 + max(linear1 / 2 + gpu0, cpu0) + max(linear0 / 2 + gpu1, cpu1)
        return (self.num_layers - 1) * stages_s + ends_s

    def _gpu_attention_s(self, load: SubBatchLoad) -> float:
        decode_s = self.gpu_decode_s(load.num_gpu_decodes, load.gpu_context_tokens)
        return decode_s + _prefills_s(self, load.prefill_chunks)

    def _cpu_attention_s(self, load: SubBatchLoad) -> float:
        return self.cpu_decode_s(load.num_cpu_decodes, load.cpu_context_tokens)


def _prefills_s(estimator: RooflineEstimator, chunks: Iterable[tuple[int, int]]) -> float:
    return sum(estimator.prefill_s(chunk, past) for chunk, past in chunks)
