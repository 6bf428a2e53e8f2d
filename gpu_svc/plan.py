"""What the executor is told and what it answers, as values; wire.py makes them from protobuf and back.

Meanings are those of executor.proto. Ids and blocks that are handled in bulk are numpy arrays.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


class Mode(Enum):
    GPU_ONLY = "gpu_only"
    ASYMMETRIC = "asymmetric"


class Tier(Enum):
    GPU = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner keeps to in an epoch."""

    max_sequences: int
    max_batch_tokens: int
    max_sequence_tokens: int


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class NewSequence:
    sequence_id: int
    token_ids: Int32Array
    tier: Tier
    blocks: Int32Array
    sampling: Sampling = Sampling()
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Swap:
    sequence_id: int
    target: Tier
    blocks: Int32Array


@dataclass(frozen=True, slots=True)
class NewBlocks:
    sequence_id: int
    blocks: Int32Array


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    sequence_id: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SubBatch:
    prefills: tuple[PrefillChunk, ...] = ()
    gpu_decodes: tuple[int, ...] = ()
    cpu_decodes: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that pass the linear operations."""
        return sum(chunk.num_tokens for chunk in self.prefills) + len(self.gpu_decodes) + len(self.cpu_decodes)


@dataclass(frozen=True, slots=True)
class IterationPlan:
    epoch: int
    iteration: int
    mode: Mode
    released: tuple[int, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    swaps: tuple[Swap, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    sub_batches: tuple[SubBatch, ...] = ()
    host_blocks_used: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    sequence_id: int
    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""


@dataclass(frozen=True, slots=True)
class Timings:
    total_ns: int = 0
    cpu_wait_ns: int = 0
    cpu_attention_ns: int = 0
    swap_ns: int = 0
    head_ns: int = 0
    idle_ns: int = 0


class ErrorKind(Enum):
    CPU_ATTENTION_LOST = "cpu_attention_lost"
    STALE = "stale"
    INVALID_PLAN = "invalid_plan"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class IterationResult:
    epoch: int
    iteration: int
    tokens: tuple[tuple[int, int], ...] = ()
    """(sequence id, token id)"""
    logprobs: tuple[TokenLogprobs, ...] = ()
    timings: Timings = field(default_factory=Timings)
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    gpu_attended_tokens: int = 0
    cpu_attended_tokens: int = 0
    error: ErrorKind | None = None
    error_message: str = ""


class InvalidPlanError(Exception):
    """The plan contradicts the executor's state; the text says where."""
