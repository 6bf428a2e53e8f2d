"""What the CPU attention services do in one iteration and in which order; pipeline.py shows why in this one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu_svc.batch import Batch
from gpu_svc.host_tier import CpuWork
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import LayerBatch


@dataclass(frozen=True, slots=True)
class CpuProgram:
    order: tuple[Batch, ...]
    """In which batches go through the executor's layers, where the CPU computes the first."""
    attended: tuple[Batch, ...]
    """With CPU decodes, in the order in which they are submitted."""
    passing: tuple[tuple[int, LayerBatch], ...]
    """What passes the CPU layers, each with its sub-batch's index."""
    in_turn: bool = False
    """One batch goes through all upper layers before the next does."""

    @classmethod
    def of(cls, batches: Sequence[Batch], policy: ExecutionPolicy, num_layers: int) -> "CpuProgram":
        """Of sub-batches and a cohort, in a model of so many layers."""
        cpu_layers = policy.decode_cpu_layers
        with_decodes = [batch for batch in batches if batch.cpu_work]
        if cpu_layers == 0:
            # Sub-batch 1 is submitted first in each layer.
            return cls(tuple(batches), tuple(reversed(with_decodes)), ())
        order = _order(batches)
        prompts = [(batch.index, batch.prompt_pass.work) for batch in order if batch.prompt_pass]
        last = [(batch.index, batch.last_pass.work) for batch in order if batch.last_pass]
        # Where all layers are the CPU's, none is left in which to attend.
        attended = tuple(batch for batch in order if batch in with_decodes) if cpu_layers < num_layers else ()
        # Weights that are streamed are to come once for both.
        in_turn = policy.resident_layers >= num_layers - cpu_layers
        return cls(order, attended, (*prompts, *last), in_turn)

    @property
    def has_work(self) -> bool:
        return bool(self.attended or self.passing)

    @property
    def cpu_work(self) -> list[CpuWork]:
        return [part for batch in self.attended for part in batch.cpu_work]

    def attended_in(self, pool: int) -> list[int]:
        """Indices of the batches that this host pool's service has decodes of, in the order in which it gets them."""
        return [batch.index for batch in self.attended if any(part.pool == pool for part in batch.cpu_work)]


def _order(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """The second first where it need not wait for the CPU; but a prompt that goes on in it needs the first before."""
    if len(batches) == 2:
        first, second = batches
        goes_on = bool(np.intersect1d(first.chunk_slots, second.chunk_slots).size)
        if first.last_pass and not second.last_pass and not goes_on:
            return second, first
    return tuple(batches)
