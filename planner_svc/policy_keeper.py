"""Chooses where layers run while a service runs, by what its executor measured and by the requests that come."""

import logging
from math import log2

from planner_svc.estimator import OperationTables
from planner_svc.executor_client import EpochLimits, Placement
from planner_svc.policy import (
    PolicyChooser,
    PolicyEstimator,
    PolicySearch,
    RequestMix,
    ServiceMemory,
    decoder_figures,
    measured_figures,
    measured_machine,
)
from planner_svc.scheduler import Demand
from svc_common.config import Config
from svc_common.model.spec import ModelSpec
from svc_common.policy import ExecutionPolicy

CONSIDER_EVERY_S = 5.0
_FIRST_PROMPT_TOKENS, _FIRST_OUTPUT_TOKENS, _FIRST_SEQUENCES = 512, 128, 8
"""What is chosen for before any request has come."""
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
"""Of KV, and of activations on a GPU."""

logger = logging.getLogger(__name__)


class PolicyKeeper:
    """Leaves a model alone whose layers all lie on the device; there the scheduler's modes apply."""

    def __init__(self, config: Config, spec: ModelSpec, limits: EpochLimits, host_memory_bytes: int) -> None:
        self._spec = spec
        self._limits = limits
        self._host_kv_bytes = sum(service.kv_bytes for service in config.cpu_attn_services)
        self._host_memory_bytes = host_memory_bytes
        self._chooser: PolicyChooser | None = None
        self._estimator: PolicyEstimator | None = None
        self._next_s = 0.0
        self.tables: OperationTables | None = None
        """Of operations on both processors; they hold whichever layers run where."""

    def to_measure(self, placement: Placement) -> ExecutionPolicy | None:
        """Under which layers on the CPU can be measured; None where there is nothing to choose, or it was measured."""
        if self._chooser or placement.streamed_layers == 0 or placement.host_blocks == 0:
            return None
        if len(placement.pools) > 1:  # CPU layers are computed by one service.
            return None
        return ExecutionPolicy(placement.resident_layers, 1, 1)

    def measured(self, placement: Placement, tables: OperationTables) -> ExecutionPolicy | None:
        """The policy to begin with; None where the executor could not measure layers on the CPU."""
        if not tables.cpu_linear or placement.memory is None or placement.policy is None:
            return None
        # What weights take, of whatever type, the executor says; of activations the CPU makes fp32.
        dtype_bytes = 4 if placement.device == "cpu" else _DTYPE_BYTES[placement.compute_dtype]
        memory = ServiceMemory(
            gpu_bytes=placement.memory.placed_bytes,
            gpu_kv_bytes=placement.memory.kv_bytes,
            host_bytes=self._host_memory_bytes,
            host_kv_bytes=self._host_kv_bytes,
            layer_bytes=placement.memory.layer_bytes,
            other_bytes=placement.memory.other_bytes,
        )
        figures = measured_figures(decoder_figures(self._spec, dtype_bytes, _DTYPE_BYTES[placement.kv_dtype]), memory)
        self._estimator = PolicyEstimator(figures, measured_machine(tables, figures, memory), warm=True)
        self._chooser = PolicyChooser(PolicySearch(self._estimator), placement.policy)
        self.tables = tables
        first = self._chooser.first(self._mix(_FIRST_PROMPT_TOKENS, _FIRST_OUTPUT_TOKENS, _FIRST_SEQUENCES))
        logger.info("not all layers fit on the device: they run as %s until the load says otherwise", first)
        return first

    def opened(self, placement: Placement, now_s: float) -> None:
        """An epoch runs by this policy."""
        if self._chooser and placement.policy and placement.policy != self._chooser.policy:
            self._chooser.changed(placement.policy, now_s)

    def consider(self, demand: Demand, now_s: float) -> ExecutionPolicy | None:
        """Another policy, where the requests in hand and those that came of late are worth the change."""
        if self._chooser is None or demand.num_sequences == 0 or now_s < self._next_s:
            return None
        self._next_s = now_s + CONSIDER_EVERY_S
        mix = self._mix(round(demand.prompt_tokens), round(demand.output_tokens), demand.num_sequences)
        change = self._chooser.consider(mix, demand.computed_tokens, now_s)
        if change is None:
            return None
        logger.info(
            "%d requests of %d tokens in, %d out: layers should run as %s, %.2f times as fast, after %.1f s",
            mix.num_sequences,
            mix.prompt_tokens,
            mix.output_tokens,
            change.policy,
            change.gain,
            change.cost_s,
        )
        return change.policy

    def _mix(self, prompt_tokens: int, output_tokens: int, num_sequences: int) -> RequestMix:
        """In steps, so that a load that stays about the same is one mix; as many at a time as may run."""
        longest = self._limits.max_sequence_tokens
        prompt_tokens = min(_step(prompt_tokens), max(1, longest - 1))
        return RequestMix(
            prompt_tokens=prompt_tokens,
            output_tokens=min(_step(output_tokens), max(1, longest - prompt_tokens)),
            num_sequences=min(_step(num_sequences), self._limits.max_sequences),
            batch_tokens=self._limits.max_batch_tokens,
        )


def _step(number: int) -> int:
    """The nearest power of the square root of 2."""
    return round(2 ** (round(2 * log2(max(1, number))) / 2))
