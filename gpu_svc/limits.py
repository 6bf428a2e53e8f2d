"""What an epoch may ask of the executor, and the answer to a plan that asks for something else."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from svc_common.plan import IterationPlan, Mode

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner keeps to in an epoch."""

    max_sequences: int
    max_batch_tokens: int
    max_sequence_tokens: int


class InvalidPlanError(Exception):
    """The plan contradicts the executor's state; the text says where."""


def check_mode(plan: IterationPlan) -> None:
    """Whether a plan's sub-batches and cohort are such as its mode has. Raises InvalidPlanError."""
    mode, batches = plan.mode, plan.sub_batches
    if (mode is Mode.DECOUPLED) != (plan.cohort is not None):
        raise InvalidPlanError(f"a {mode.value} iteration {'without' if plan.cohort is None else 'with'} a cohort")
    if mode in (Mode.SAME_LAYER, Mode.DECOUPLED) and len(batches) > 1:
        raise InvalidPlanError(f"a {mode.value} iteration has {len(batches)} sub-batches; at most one")
    if len(batches) > 2 or (len(batches) == 2 and batches[1].gpu_decodes):
        raise InvalidPlanError("at most two sub-batches, and of two the second holds no GPU decodes")
    if mode in (Mode.GPU_ONLY, Mode.DECOUPLED) and any(batch.cpu_decodes for batch in batches):
        raise InvalidPlanError(f"a sub-batch of a {mode.value} iteration holds CPU decodes")
