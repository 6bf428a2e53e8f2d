"""What the layers read of one sub-batch: token ids, positions, cache rows, attention work.

Rows of a batch are tokens, in the order prefill chunks, GPU decodes, CPU decodes by host pool. All of it is made once
per iteration and shared by all layers.
"""

from dataclasses import dataclass

from torch import Tensor

from gpu_svc.attention import DecodeAttention, PrefillAttention
from gpu_svc.host_tier import CpuWork
from gpu_svc.kv_cache import KvPlaces
from gpu_svc.sequences import Slots
from svc_common.tensor_plane import LayerBatch


def exchange_slot(index: int) -> int:
    """Of a sub-batch's place in the plan. Slot 1 serves a second sub-batch or a cohort: they never meet."""
    return min(index, 1)


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """One prefill chunk."""

    rows: slice
    attention: PrefillAttention
    on_host: bool
    host_places: KvPlaces
    """Where its K and V go in its host pool; of no use for chunks on the GPU."""
    pool: int
    """That host pool."""
    lower_attention: PrefillAttention | None = None
    """In layers that the CPU computes for decodes only, over the lower pool; None where there are no such layers."""
    lower_places: KvPlaces | None = None
    """Where its K and V go there."""


@dataclass(frozen=True, slots=True)
class CpuPass:
    """Rows of a sub-batch that go through the CPU layers together."""

    rows: slice
    work: LayerBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """One sub-batch, ready to run."""

    index: int
    """Its place in the plan; COHORT for a cohort."""
    token_ids: Tensor  # [n], int64, device
    positions: Tensor  # [n], int64, device
    chunks: tuple[ChunkWork, ...]
    chunk_slots: Slots  # their sequences
    gpu_kv_tokens: Tensor | slice  # tokens whose K and V go to the GPU cache
    gpu_kv_places: KvPlaces  # where they go
    gpu_decode_rows: slice
    gpu_decode: DecodeAttention | None
    cpu_decode_rows: slice
    cpu_work: tuple[CpuWork, ...]  # one for each host pool that has any of them
    output_rows: Tensor  # [num_outputs], int64, device: rows that yield a token
    output_slots: Slots  # their sequences
    gpu_attended_tokens: int
    cpu_attended_tokens: int
    prompt_rows: slice
    prompt_pass: CpuPass | None = None
    """Of prompts with which the executor goes on in layers that are the CPU's for decodes."""
    last_pass: CpuPass | None = None
    """Of the rows that only then go through the executor's layers: decodes, and prompts where they have as many."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def host_chunk_tokens(self) -> int:
        """Prompt tokens whose K and V go to the host pool."""
        return sum(chunk.rows.stop - chunk.rows.start for chunk in self.chunks if chunk.on_host)
