"""Predicts from a machine's figures alone: each operation takes what its bytes or its FLOP take, whichever is more.

Two sub-batches 0 and 1 in a layer, a their attention on the GPU, c on the CPU (NEO, MLSys 2025, section 4):

    stage 1 = max{linear 0 + a1, c1}        stage 2 = max{linear 1 + a0, c0}

The first layer's stage 1 and the last one's stage 2 have nothing from the neighbouring layer beside them.

A cohort's layer takes its attention on the CPU, its linear operations on the GPU, and half a layer of the batch until
the GPU is free for them: tau = attention + linear + layer / 2 (simulation spec, "decoupled"). There it advances
x = pass / tau layers while the batch goes through its L, pass = L layer / (1 - linear / tau): a mean, which need not be
whole. A whole number m of them takes the longer of what the GPU and what the cohort needs,

    pass = max{L layer + m linear, m tau}

up to m = floor(x) the former, so that the cohort costs its linear operations alone; where x is whole both agree.
"""

import copy
from collections.abc import Iterable
from typing import Self

from planner_svc.estimator.estimator import CohortLoad, IterationLoad, SubBatchLoad, pools_s, slowest_pool_s
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

    def cpu_decode_s(self, num_sequences: int, context_tokens: int, pool: int = 0) -> float:
        """Of one layer. The machine's figures are those of each pool."""
        if num_sequences == 0:
            return 0.0
        return self._cpu_attention_s(num_sequences, context_tokens, pool) + self._cpu_hop_s

    def _cpu_attention_s(self, num_sequences: int, context_tokens: int, pool: int = 0) -> float:
        """Without the way there and back."""
        attention_s = context_tokens * self._cpu_context_token_s + num_sequences * self._cpu_sequence_s
        return self._factors.cpu_pool(pool) * attention_s

    def head_s(self, num_outputs: int) -> float:
        """Of one iteration. The weights are read whatever the number of outputs."""
        return self._factors.head * (self._head_floor_s + self._head_token_s * num_outputs)

    def swap_s(self, num_bytes: float) -> float:
        """Of all layers, one way."""
        return self._factors.swap * self._link_byte_s * num_bytes

    def iteration_s(self, load: IterationLoad) -> float:
        """Layers and head, and what of the swaps the layers don't hide; both ways of the link at once."""
        layers_s = self._layers_s(load.first, load.second, load.cohort)
        swap_s = self.swap_s(max(self._link_bytes(load)))
        return max(layers_s, swap_s) + self.head_s(_num_items(load)) + self._overhead_s()

    def _link_bytes(self, load: IterationLoad) -> tuple[float, float]:
        """Out to the host and in to the GPU: swaps, and prompts whose KV lies on the host."""
        first, second, token_bytes = load.first, load.second, self.kv_bytes_per_token
        return (
            load.swap_out_bytes + token_bytes * (first.host_prefill_tokens + second.host_prefill_tokens),
            load.swap_in_bytes + token_bytes * (first.host_past_tokens + second.host_past_tokens),
        )

    def _overhead_s(self) -> float:
        return self._factors.overhead * self._iteration_s

    def terms(self, load: IterationLoad) -> Terms:
        """The same iteration by its parts; the GPU's work is not slowed by the CPU's."""
        first, second, cohort = load.first, load.second, load.cohort
        # (layers, tokens in each)
        passes = [(self.num_layers, batch.num_tokens) for batch in (first, second)]
        passes.append((cohort.num_layers, cohort.num_sequences))
        weights_s = tokens_s = 0.0
        for num_layers, num_tokens in passes:
            if num_tokens:
                parts = self._linear_parts_s(num_tokens)
                weights_s += num_layers * parts[0]
                tokens_s += num_layers * parts[1]
        cpu_pools_s = pools_s(load, self.num_layers, self._cpu_attention_s)
        prefill_s = self.num_layers * sum(_prefills_s(self, batch.prefill_chunks) for batch in (first, second))
        decode_s = self.num_layers * self.gpu_decode_s(first.num_gpu_decodes, first.gpu_context_tokens)
        layers_s = self._layers_s(first, second, cohort)
        swap_s = self.swap_s(max(self._link_bytes(load)))
        return Terms(
            weights_s=weights_s,
            tokens_s=tokens_s,
            prefill_s=prefill_s,
            gpu_decode_s=decode_s,
            overhead_s=self._overhead_s(),
            cpu_wait_s=max(0.0, layers_s - weights_s - tokens_s - prefill_s - decode_s),
            cpu_decode_s=sum(cpu_pools_s),
            cpu_pools_s=cpu_pools_s if len(cpu_pools_s) > 1 else (),
            head_s=self.head_s(_num_items(load)),
            swap_s=swap_s,
            swap_hidden_s=layers_s,
        )

    def timeline(self, load: IterationLoad) -> Timeline:
        """The same iteration as how long each processor and each way of the link works in it."""
        batches, cohort = (load.first, load.second), load.cohort
        link_out_bytes, link_in_bytes = self._link_bytes(load)
        gpu_layer_s = sum(self.linear_s(batch.num_tokens) + self._gpu_attention_s(batch) for batch in batches)
        cpu_layer_s = sum(self._cpu_s(batch) for batch in batches)
        cohort_linear_s = self.linear_s(cohort.num_sequences)
        cohort_cpu_s = slowest_pool_s(self, cohort.num_sequences, cohort.context_tokens, cohort.cpu_pools)
        head_s = self.head_s(_num_items(load))
        return Timeline(
            total_s=self.iteration_s(load),
            gpu_s=self.num_layers * gpu_layer_s + cohort.num_layers * cohort_linear_s + head_s,
            cpu_s=self.num_layers * cpu_layer_s + cohort.num_layers * cohort_cpu_s,
            link_out_s=self.swap_s(link_out_bytes),
            link_in_s=self.swap_s(link_in_bytes),
        )

    def _layers_s(self, first: SubBatchLoad, second: SubBatchLoad, cohort: CohortLoad) -> float:
        linear0, gpu0, cpu0 = (
            self.linear_s(first.num_tokens),
            self._gpu_attention_s(first),
            self._cpu_s(first),
        )
        if second.num_tokens == 0:
            return self._beside_cohort_s(linear0 + max(gpu0, cpu0), cohort)
        linear1 = self.linear_s(second.num_tokens)
        gpu1, cpu1 = self._gpu_attention_s(second), self._cpu_s(second)
        stages_s = max(linear0 + gpu1, cpu1) + max(linear1 + gpu0, cpu0)
        ends_s = (linear0 + linear1) / 2 + max(linear1 / 2 + gpu0, cpu0) + max(linear0 / 2 + gpu1, cpu1)
        return (self.num_layers - 1) * stages_s + ends_s

    def _beside_cohort_s(self, layer_s: float, cohort: CohortLoad) -> float:
        batch_s = self.num_layers * layer_s
        if cohort.num_layers == 0:
            return batch_s
        linear_s = self.linear_s(cohort.num_sequences)
        attention_s = slowest_pool_s(self, cohort.num_sequences, cohort.context_tokens, cohort.cpu_pools)
        tau_s = attention_s + linear_s + layer_s / 2
        return max(batch_s + cohort.num_layers * linear_s, cohort.num_layers * tau_s)

    def _gpu_attention_s(self, load: SubBatchLoad) -> float:
        decode_s = self.gpu_decode_s(load.num_gpu_decodes, load.gpu_context_tokens)
        return decode_s + _prefills_s(self, load.prefill_chunks)

    def _cpu_s(self, load: SubBatchLoad) -> float:
        return slowest_pool_s(self, load.num_cpu_decodes, load.cpu_context_tokens, load.cpu_pools)


def _num_items(load: IterationLoad) -> int:
    """Rows of the head."""
    return load.first.num_items + load.second.num_items + load.cohort.num_outputs


def _prefills_s(estimator: RooflineEstimator, chunks: Iterable[tuple[int, int]]) -> float:
    return sum(estimator.prefill_s(chunk, past) for chunk, past in chunks)
