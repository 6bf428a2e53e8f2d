"""What an epoch may ask of the executor, and the answer to a plan that asks for something else."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner keeps to in an epoch."""

    max_sequences: int
    max_batch_tokens: int
    max_sequence_tokens: int


class InvalidPlanError(Exception):
    """The plan contradicts the executor's state; the text says where."""
