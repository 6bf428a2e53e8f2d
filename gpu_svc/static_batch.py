"""Buffers on the device at addresses that stay, from which captured iterations read what changes between replays.

A captured iteration has rows for so many decodes; one with fewer is padded. A padded row on the GPU writes its K and V
to the cache's scratch block and attends to that one token; a padded row on the CPU crosses to the exchange slot and
back, and the CPU does not look at it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gpu_svc.batch import Batch, exchange_slot
from gpu_svc.batch_builder import DecodeRows
from gpu_svc.graph_keys import GraphKey
from gpu_svc.host_tier import CpuWork
from gpu_svc.kv_cache import KvPlaces, KvShape
from gpu_svc.packed_arrays import Array, PackedArrays, staging

_NO_SLOTS = np.zeros(0, np.int64)


class StaticBatches:
    """Buffers of one epoch, shared by all its captured iterations."""

    def __init__(
        self,
        shape: KvShape,
        device: torch.device,
        scratch_block: int,
        host_blocks: int,
        max_rows: int,
        longest: int,
    ) -> None:
        """`max_rows` of a key, `longest` context in tokens; `host_blocks` of the only host pool, 0 without one."""
        self._device = device
        self._scratch_block = scratch_block
        self._host_blocks = host_blocks
        width = -(-longest // shape.block_tokens)
        self._tables = torch.zeros((max_rows, width), dtype=torch.int32, device=device)
        fixed = self._layout(GraphKey(max_rows, (0,))).num_bytes
        self._buffer = torch.zeros(fixed + self._tables.nbytes, dtype=torch.uint8, device=device)
        self._layouts: dict[GraphKey, PackedArrays] = {}

    @property
    def num_bytes(self) -> int:
        return self._tables.nbytes + self._buffer.nbytes

    @staticmethod
    def _layout(key: GraphKey) -> PackedArrays:
        rows, gpu_rows = (key.num_rows,), (key.gpu_rows,)
        # Token ids, positions, rows of output; blocks and offsets of K and V; context lengths.
        wide = [(np.int64, shape) for shape in (rows, rows, rows, gpu_rows, gpu_rows)]
        return PackedArrays(*wide, (np.int32, gpu_rows))

    def _layout_of(self, key: GraphKey) -> PackedArrays:
        if key not in self._layouts:
            self._layouts[key] = self._layout(key)
        return self._layouts[key]

    def _first_rows(self, key: GraphKey) -> list[int]:
        """Of the CPU decodes of each sub-batch, among the rows of all."""
        return list(accumulate(key.cpu_rows[:-1], initial=key.gpu_rows))

    def fill(self, key: GraphKey, sub_batches: Sequence[DecodeRows]) -> None:
        """Padded to the key; () leaves nothing but padding. What was filled in before is gone."""
        layout, num_gpu = self._layout_of(key), sub_batches[0].num_gpu if sub_batches else 0
        width = sub_batches[0].block_tables.shape[1] if num_gpu else 1
        table_bytes = key.gpu_rows * width * 4
        staged = staging(layout.num_bytes + table_bytes, self._device)
        numbers = staged.numpy()
        token_ids, positions, output_rows, kv_blocks, kv_offsets, context = layout.in_host(numbers)
        tables = numbers[layout.num_bytes :].view(np.int32).reshape(key.gpu_rows, width)
        for array in (token_ids, positions, output_rows):
            array[:] = 0
        kv_blocks[num_gpu:], kv_offsets[num_gpu:], context[num_gpu:] = self._scratch_block, 0, 1
        tables[num_gpu:] = self._scratch_block
        if num_gpu:
            first = sub_batches[0]
            kv_blocks[:num_gpu], kv_offsets[:num_gpu] = first.kv_blocks, first.kv_offsets
            context[:num_gpu] = first.positions[:num_gpu] + 1
            tables[:num_gpu] = first.block_tables
        self._fill_rows(key, sub_batches, token_ids, positions, output_rows)
        self._buffer[: len(staged)].copy_(staged, non_blocking=True)
        if key.gpu_rows:
            packed = self._buffer[layout.num_bytes : layout.num_bytes + table_bytes].view(torch.int32)
            self._tables[: key.gpu_rows, :width].copy_(packed.view(key.gpu_rows, width))

    def _fill_rows(
        self,
        key: GraphKey,
        sub_batches: Sequence[DecodeRows],
        token_ids: Array,
        positions: Array,
        output_rows: Array,
    ) -> None:
        num_outputs = 0
        for rows, first_cpu_row in zip(sub_batches, self._first_rows(key), strict=False):
            num_cpu = len(rows.token_ids) - rows.num_gpu
            cpu_rows = slice(first_cpu_row, first_cpu_row + num_cpu)
            for target, source in ((token_ids, rows.token_ids), (positions, rows.positions)):
                target[: rows.num_gpu], target[cpu_rows] = source[: rows.num_gpu], source[rows.num_gpu :]
            outputs = output_rows[num_outputs : num_outputs + len(rows.token_ids)]
            outputs[: rows.num_gpu] = np.arange(rows.num_gpu)
            outputs[rows.num_gpu :] = np.arange(first_cpu_row, first_cpu_row + num_cpu)
            num_outputs += len(rows.token_ids)

    def output_rows(self, key: GraphKey) -> Tensor:
        """[num_rows]: first the rows that yield a token, in the plan's order, among those of all sub-batches."""
        return self._layout_of(key).on_device(self._buffer)[2]

    def lengths(self, key: GraphKey) -> tuple[Tensor, Tensor]:
        """Of the GPU's rows: context [gpu_rows], the new token included, and block tables [gpu_rows, stride]."""
        return self._layout_of(key).on_device(self._buffer)[5], self._tables[: key.gpu_rows]

    def batches(self, key: GraphKey) -> list[Batch]:
        """The sub-batches that a captured iteration computes, without their attention on the GPU.

        To the CPU they are decodes of a single token, in whatever blocks.
        """
        token_ids, positions, _, kv_blocks, kv_offsets, _ = self._layout_of(key).on_device(self._buffer)
        batches = []
        for index, (num_cpu, first_cpu_row) in enumerate(zip(key.cpu_rows, self._first_rows(key), strict=True)):
            num_gpu = 0 if index else key.gpu_rows
            rows = slice(first_cpu_row - num_gpu, first_cpu_row + num_cpu)
            none = np.zeros(num_gpu, np.int32)
            batches.append(
                Batch(
                    index=index,
                    token_ids=token_ids[rows],
                    positions=positions[rows],
                    chunks=(),
                    chunk_slots=_NO_SLOTS,
                    gpu_kv_tokens=slice(0, num_gpu),
                    gpu_kv_places=KvPlaces(none, none, (kv_blocks[:num_gpu], kv_offsets[:num_gpu])),
                    gpu_decode_rows=slice(0, num_gpu),
                    gpu_decode=None,
                    cpu_decode_rows=slice(num_gpu, num_gpu + num_cpu),
                    cpu_work=self._padded_cpu_work(index, num_gpu, num_cpu),
                    output_rows=token_ids[:0],
                    output_slots=_NO_SLOTS,
                    gpu_attended_tokens=0,
                    cpu_attended_tokens=0,
                    prompt_rows=slice(0, 0),
                )
            )
        return batches

    def _padded_cpu_work(self, index: int, first_row: int, num_rows: int) -> tuple[CpuWork, ...]:
        if not num_rows:
            return ()
        tables = (np.arange(num_rows, dtype=np.int32) % self._host_blocks)[:, None]
        rows = slice(first_row, first_row + num_rows)
        return (CpuWork(exchange_slot(index), np.ones(num_rows, np.int32), tables, rows),)


def described(batch: Batch, rows: DecodeRows) -> Batch:
    """The padded batch with what is really in it, to report and to tell the CPU of."""
    num_cpu = len(rows.token_ids) - rows.num_gpu
    first_cpu_row = batch.cpu_decode_rows.start
    context = rows.positions + 1
    return replace(
        batch,
        gpu_decode_rows=slice(0, rows.num_gpu),
        cpu_decode_rows=slice(first_cpu_row, first_cpu_row + num_cpu),
        cpu_work=rows.cpu_work,
        output_slots=rows.slots,
        gpu_attended_tokens=int(context[: rows.num_gpu].sum()),
        cpu_attended_tokens=int(context[rows.num_gpu :].sum()),
    )
