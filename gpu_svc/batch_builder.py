"""Turns a SubBatch of ids into a Batch, or into the rows of a captured one; on a GPU by one copy."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.attention import AttentionBackend, DecodeAttention
from gpu_svc.batch import Batch, ChunkWork, CpuPass, exchange_slot
from gpu_svc.host_tier import CpuWork
from gpu_svc.kv_cache import KvPlaces, KvShape
from gpu_svc.limits import Int32Array
from gpu_svc.lower_pool import LowerTables
from gpu_svc.packed_arrays import to_device
from gpu_svc.sequences import SequenceTable, Slots
from svc_common.plan import SubBatch, Tier
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import LayerBatch

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A sub-batch of decodes as numbers: first those on the GPU, then those on the CPU."""

    slots: Slots
    token_ids: NDArray[np.int64]  # [n]
    positions: NDArray[np.int64]  # [n]
    kv_blocks: Int32Array  # [num_gpu_decodes], where their K and V go
    kv_offsets: NDArray[np.int64]  # [num_gpu_decodes], within these blocks
    block_tables: Int32Array  # [num_gpu_decodes, stride]
    cpu_work: tuple[CpuWork, ...]

    @property
    def num_gpu(self) -> int:
        return len(self.kv_blocks)


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """As in Batch."""

    token_ids: Tensor
    positions: Tensor
    kv_tokens: Tensor | slice
    kv_places: KvPlaces
    output_rows: Tensor
    decode: DecodeAttention | None


class BatchBuilder:
    """Made once per epoch."""

    def __init__(
        self,
        table: SequenceTable,
        backend: AttentionBackend,
        shape: KvShape,
        device: torch.device,
        policy: ExecutionPolicy,
        lower_tables: LowerTables,
    ) -> None:
        self._table = table
        self._backend = backend
        self._shape = shape
        self._device = device
        self._policy = policy
        self._lower_tables = lower_tables

    def build(self, sub_batch: SubBatch, index: int, first_row: int = 0) -> Batch:
        """`index` is the sub-batch's place in its plan, or COHORT. The plan has been checked.

        `first_row`: tokens that pass the CPU layers in sub-batches before this one.
        """
        table = self._table
        gpu_slots, cpu_slots = table.slots(sub_batch.gpu_decodes), table.slots(sub_batch.cpu_decodes)
        chunk_slots = table.slots(chunk.sequence_id for chunk in sub_batch.prefills)
        starts = np.array([chunk.start for chunk in sub_batch.prefills], np.int64)
        lengths = np.array([chunk.num_tokens for chunk in sub_batch.prefills], np.int64)
        order = np.argsort(table.pool[cpu_slots], kind="stable")  # Each pool's rows are handed over in one piece.
        decode_slots = np.concatenate([gpu_slots, cpu_slots[order]])
        num_chunk_tokens, num_gpu_decodes = int(lengths.sum()), len(gpu_slots)
        num_tokens = num_chunk_tokens + len(decode_slots)

        token_slots = np.concatenate([np.repeat(chunk_slots, lengths), decode_slots])
        positions = np.concatenate(
            [*(np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)), table.computed_tokens[decode_slots]]
        )
        token_ids = np.concatenate(
            [
                *(
                    table.prompts[slot][start : start + length]
                    for slot, start, length in zip(chunk_slots, starts, lengths, strict=True)
                ),
                table.last_token[decode_slots],
            ]
        )
        offsets = positions % self._shape.block_tokens
        blocks = table.block_tables[token_slots, positions // self._shape.block_tokens].astype(np.int64)
        blocks -= table.first_block(token_slots)
        on_gpu = table.tier[token_slots] == Tier.GPU.value
        ends = np.cumsum(lengths)
        finished = starts + lengths == table.prompt_tokens[chunk_slots]
        decode_context = table.computed_tokens[decode_slots] + 1  # In the order of rows.
        gpu_context = decode_context[:num_gpu_decodes]
        first_cpu_row = num_chunk_tokens + num_gpu_decodes
        cpu_rows = np.empty(len(order), np.int64)
        cpu_rows[order] = np.arange(first_cpu_row, num_tokens)
        # In the plan's order.
        output_rows = np.concatenate([ends[finished] - 1, np.arange(num_chunk_tokens, first_cpu_row), cpu_rows])
        device = self._on_device(token_ids, positions, on_gpu, blocks, offsets, output_rows, gpu_slots, gpu_context)
        prompt_pass, last_pass = self._passes(first_row, starts, lengths, chunk_slots, decode_slots, decode_context)
        return Batch(
            index=index,
            token_ids=device.token_ids,
            positions=device.positions,
            chunks=tuple(
                self._chunk(int(slot), int(start), int(length), blocks, offsets, int(end))
                for slot, start, length, end in zip(chunk_slots, starts, lengths, ends, strict=True)
            ),
            chunk_slots=chunk_slots,
            gpu_kv_tokens=device.kv_tokens,
            gpu_kv_places=device.kv_places,
            gpu_decode_rows=slice(num_chunk_tokens, num_chunk_tokens + num_gpu_decodes),
            gpu_decode=device.decode,
            cpu_decode_rows=slice(first_cpu_row, num_tokens),
            cpu_work=self._cpu_work(cpu_slots[order], first_cpu_row, index),
            output_rows=device.output_rows,
            output_slots=np.concatenate([chunk_slots[finished], gpu_slots, cpu_slots]),
            gpu_attended_tokens=int(gpu_context.sum()),
            cpu_attended_tokens=int(decode_context[num_gpu_decodes:].sum()),
            prompt_rows=slice(0, num_chunk_tokens),
            prompt_pass=prompt_pass,
            last_pass=last_pass,
        )

    def decode_rows(self, sub_batch: SubBatch, index: int, first_cpu_row: int) -> DecodeRows:
        """Of one without prompts, beside one host pool at most. Its CPU decodes will be in the batch's rows from
        `first_cpu_row` on. The plan has been checked.
        """
        table, block_tokens = self._table, self._shape.block_tokens
        gpu_slots, cpu_slots = table.slots(sub_batch.gpu_decodes), table.slots(sub_batch.cpu_decodes)
        slots = np.concatenate([gpu_slots, cpu_slots])
        positions = table.computed_tokens[slots]
        gpu_positions = positions[: len(gpu_slots)]
        return DecodeRows(
            slots=slots,
            token_ids=table.last_token[slots],
            positions=positions,
            kv_blocks=table.block_tables[gpu_slots, gpu_positions // block_tokens],
            kv_offsets=gpu_positions % block_tokens,
            block_tables=self._tables(gpu_slots, gpu_positions + 1),
            cpu_work=self._cpu_work(cpu_slots, first_cpu_row, index),
        )

    def _on_device(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        on_gpu: NDArray[np.bool_],
        blocks: NDArray[np.int64],
        offsets: NDArray[np.int64],
        output_rows: NDArray[np.int64],
        gpu_slots: Slots,
        gpu_context: NDArray[np.int64],
    ) -> "_OnDevice":
        """Everything in one copy, but what a backend brings itself."""
        on_cpu, num_kv = self._device.type == "cpu", int(on_gpu.sum())
        # Rows of the GPU's tokens; a slice where they are the first ones, which costs no copy.
        first_ones = bool(on_gpu[:num_kv].all())
        kv_blocks, kv_offsets = blocks[on_gpu], offsets[on_gpu]
        tables = self._tables(gpu_slots, gpu_context) if len(gpu_slots) else None
        attend = self._backend.decode_on_device
        arrays = [token_ids.astype(np.int64), positions, output_rows]
        arrays += [] if first_ones else [np.flatnonzero(on_gpu)]
        arrays += [] if on_cpu else [kv_blocks, kv_offsets]
        lengths = [gpu_context.astype(np.int32), tables] if attend and tables is not None else []
        there = iter(to_device([*arrays, *lengths], self._device))
        ids, places, outputs = next(there), next(there), next(there)
        kv_tokens = slice(0, num_kv) if first_ones else next(there)
        index = None if on_cpu else (next(there), next(there))
        decode: DecodeAttention | None = None
        if attend and lengths:
            decode = attend(next(there), next(there), int(gpu_context.max()))
        elif tables is not None:
            decode = self._backend.decode(gpu_context, tables)
        kv_places = KvPlaces(kv_blocks.astype(np.int32), kv_offsets.astype(np.int32), index)
        return _OnDevice(ids, places, kv_tokens, kv_places, outputs, decode)

    def _passes(
        self,
        first_row: int,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        chunk_slots: Slots,
        decode_slots: Slots,
        context: NDArray[np.int64],
    ) -> tuple[CpuPass | None, CpuPass | None]:
        """Of prompts by themselves, and of what comes through last; `context` [num_decodes] is that of the decodes."""
        for_prompts, for_decodes = self._policy.prefill_cpu_layers, self._policy.decode_cpu_layers
        num_prompt_tokens = int(lengths.sum())
        num_tokens = num_prompt_tokens + len(decode_slots)
        if for_decodes == 0 or num_tokens == 0:
            return None, None
        slots = np.concatenate([chunk_slots, decode_slots])
        longest = int(np.concatenate([starts + lengths, context]).max())
        stride = -(-longest // self._shape.block_tokens)
        tables = self._lower_tables.of(self._table.block_tables[slots, :stride], self._table.tier[slots])
        num_chunks = len(starts)

        def through(num_layers: int, rows: slice, chunks: slice, decodes: slice, of_tables: slice) -> CpuPass | None:
            if num_layers == 0 or rows.start == rows.stop:
                return None
            return CpuPass(
                rows,
                LayerBatch(
                    first_row + rows.start,
                    num_layers,
                    chunk_starts=starts[chunks].astype(np.int32),
                    chunk_tokens=lengths[chunks].astype(np.int32),
                    context_tokens=context[decodes].astype(np.int32),
                    block_tables=tables[of_tables],
                ),
            )

        every, none = slice(None), slice(0, 0)
        if for_prompts == for_decodes:
            return None, through(for_decodes, slice(0, num_tokens), every, every, every)
        return (
            through(for_prompts, slice(0, num_prompt_tokens), every, none, slice(0, num_chunks)),
            through(for_decodes, slice(num_prompt_tokens, num_tokens), none, every, slice(num_chunks, None)),
        )

    def _chunk(
        self,
        slot: int,
        start: int,
        length: int,
        blocks: NDArray[np.int64],
        offsets: NDArray[np.int64],
        end_row: int,
    ) -> ChunkWork:
        """`blocks` and `offsets` are those of the batch's tokens."""
        rows = slice(end_row - length, end_row)
        block_table = self._table.block_tables[slot] - int(self._table.first_block(np.array([slot]))[0])
        lower_attention, lower_places = None, None
        if self._policy.prefill_cpu_layers < self._policy.decode_cpu_layers:
            one = np.array([slot])
            table = self._lower_tables.of(self._table.block_tables[one], self._table.tier[one])[0]
            lower_attention = self._backend.prefill(start, length, table)
            positions = np.arange(start, start + length)
            lower_blocks = table[positions // self._shape.block_tokens].astype(np.int64)
            lower_places = KvPlaces.on(_HOST, lower_blocks, offsets[rows])
        return ChunkWork(
            rows=rows,
            attention=self._backend.prefill(start, length, block_table),
            on_host=bool(self._table.tier[slot] == Tier.HOST.value),
            host_places=KvPlaces.on(_HOST, blocks[rows], offsets[rows]),
            pool=int(self._table.pool[slot]),
            lower_attention=lower_attention,
            lower_places=lower_places,
        )

    def _cpu_work(self, slots: Slots, first_row: int, index: int) -> tuple[CpuWork, ...]:
        """Of CPU decodes sorted by pool, from `first_row` on, in the sub-batch `index` or a cohort."""
        table = self._table
        pools = table.pool[slots]
        edges = [0, *(np.flatnonzero(np.diff(pools)) + 1).tolist(), len(slots)]
        work = []
        for start, end in pairwise(edges):
            part = slots[start:end]
            if len(part):
                context = table.computed_tokens[part] + 1
                blocks = self._tables(part, context) - table.first_block(part)[:, None]
                rows = slice(first_row + start, first_row + end)
                tables = blocks.astype(np.int32)
                work.append(CpuWork(exchange_slot(index), context.astype(np.int32), tables, rows, int(pools[start])))
        return tuple(work)

    def _tables(self, slots: Slots, context_tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """[n, stride], as wide as the longest context."""
        stride = -(-int(context_tokens.max(initial=1)) // self._shape.block_tokens)
        return np.ascontiguousarray(self._table.block_tables[slots, :stride])
