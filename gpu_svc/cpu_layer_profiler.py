"""Measures the layers that cpu_attn_svc computes, through the real tensor plane; part of profiler.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gpu_svc.host_tier import HostPool
from gpu_svc.limits import Int32Array, Limits
from gpu_svc.measured import steps
from gpu_svc.stopwatch import LONG_S
from svc_common.tensor_plane import LayerBatch

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class CpuLayerProfiler:
    """Before the epoch's first plan only: it writes into blocks."""

    pool: HostPool
    num_layers: int
    """That the CPU computes."""
    hidden_size: int
    block_tokens: int
    num_blocks: int
    """Of the lower pool."""
    limits: Limits

    def linear(self) -> Iterator[tuple[int, float]]:
        """(num_tokens, one layer): decodes that see nothing but themselves."""
        for num_tokens in steps(1, self.limits.max_batch_tokens, 2):
            yield num_tokens, self._linear_s(num_tokens)

    def prefill(self) -> Iterator[tuple[int, int, float]]:
        """(chunk_tokens, past_tokens, attention in one layer)."""
        longest = min(self.limits.max_batch_tokens, self.limits.max_sequence_tokens)
        for chunk_tokens in steps(1, longest, 4):
            linear_s = self._linear_s(chunk_tokens)
            most_past = self.limits.max_sequence_tokens - chunk_tokens
            for past_tokens in (0, *steps(min(256, most_past), most_past, 4)) if most_past else (0,):
                seconds = self._layer_s(
                    np.array([past_tokens], np.int32),
                    np.array([chunk_tokens], np.int32),
                    _NOTHING,
                    self._tables(1, past_tokens + chunk_tokens),
                )
                yield chunk_tokens, past_tokens, max(0.0, seconds - linear_s)
                if seconds > LONG_S:
                    break

    def decode(self) -> Iterator[tuple[int, int, float]]:
        """(num_sequences, context tokens of all, attention in one layer)."""
        most = min(self.limits.max_sequences, self.limits.max_batch_tokens)
        for num_sequences in steps(1, most, 4):
            linear_s = self._linear_s(num_sequences)
            longest = self.limits.max_sequence_tokens
            for context_tokens in steps(min(self.block_tokens, longest), longest, 8):
                context = np.full(num_sequences, context_tokens, np.int32)
                seconds = self._layer_s(_NOTHING, _NOTHING, context, self._tables(num_sequences, context_tokens))
                yield num_sequences, num_sequences * context_tokens, max(0.0, seconds - linear_s)
                if seconds > LONG_S:
                    break

    def _linear_s(self, num_tokens: int) -> float:
        ones = np.ones(num_tokens, np.int32)
        return self._layer_s(_NOTHING, _NOTHING, ones, self._tables(num_tokens, 1))

    def _tables(self, num_sequences: int, num_tokens: int) -> Int32Array:
        """[num_sequences, stride]; where there are too few blocks some are repeated, which costs the same."""
        stride = -(-num_tokens // self.block_tokens)
        blocks = np.arange(num_sequences * stride).reshape(num_sequences, stride) % self.num_blocks
        return blocks.astype(np.int32)

    def _layer_s(self, starts: Int32Array, tokens: Int32Array, context: Int32Array, tables: Int32Array) -> float:
        """Layer after layer, so that weights come from memory, through as many as take no longer than LONG_S."""
        one = self._pass_s(LayerBatch(0, 1, starts, tokens, context, tables))
        num_layers = max(1, min(self.num_layers, int(LONG_S / one)))
        several = self._pass_s(LayerBatch(0, num_layers, starts, tokens, context, tables))
        return several / num_layers

    def _pass_s(self, batch: LayerBatch) -> float:
        pool = self.pool
        hidden = torch.randn((batch.num_tokens, self.hidden_size))
        pool.begin([], 0, layer_batches=[batch])
        pool.put_hidden(batch, hidden)
        pool.submit_layers()
        pool.take_hidden(batch, hidden)
        return pool.finish().compute_ns / 1e9
