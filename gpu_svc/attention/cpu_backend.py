"""Attention by the CPU kernels, on KV where it lies: in the cache of device cpu, or in the host pool."""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.dtypes import dtype_name
from gpu_svc.kv_cache import KvShape
from gpu_svc.kv_layout import KvBlocks
from gpu_svc.threads import cpu_threads
from svc_common.cpu_kernels import NO_SOFTCAP, Attention, DecodeWork, PrefillWork
from svc_common.model.spec import ModelSpec


class CpuAttention:
    """The backend of device cpu."""

    def __init__(self, spec: ModelSpec, shape: KvShape, dtype: torch.dtype) -> None:
        """`dtype` is the compute type."""
        self._attention = _attention(spec, shape.block_tokens, shape.dtype, dtype)
        self._on_host = self._attention
        if shape.host_dtype != shape.dtype:
            self._on_host = _attention(spec, shape.block_tokens, shape.host_dtype, dtype)

    def decode(self, context_tokens: NDArray[np.int64], block_tables: NDArray[np.int32]) -> DecodeWork:
        return DecodeWork(self._attention, context_tokens.astype(np.int32), block_tables)

    def prefill(self, start: int, num_tokens: int, blocks: NDArray[np.int32]) -> "_CpuPrefill":
        return _CpuPrefill(self._attention, self._on_host, start, num_tokens, blocks)


class _CpuPrefill:
    """Work is prepared for the tier whose turn comes."""

    def __init__(
        self, attention: Attention, on_host: Attention, start: int, num_tokens: int, blocks: NDArray[np.int32]
    ) -> None:
        self._attention = attention
        self._on_host = on_host
        self._chunk = (start, num_tokens, blocks)

    @cached_property
    def _work(self) -> PrefillWork:
        return PrefillWork(self._attention, *self._chunk)

    @cached_property
    def _host_work(self) -> PrefillWork:
        return PrefillWork(self._on_host, *self._chunk)

    def run(self, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        self._work.run(q, layer_blocks, out)

    def run_on_host(self, q: Tensor, layer: KvBlocks, kv: Tensor, out: Tensor) -> None:
        self._host_work.run(q, layer.elements, out, layer.scales)


def _attention(spec: ModelSpec, block_tokens: int, kv_dtype: torch.dtype, dtype: torch.dtype) -> Attention:
    return Attention(
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_tokens=block_tokens,
        kv_dtype=dtype_name(kv_dtype),
        exchange_dtype=dtype_name(dtype),
        softmax_scale=spec.head_dim**-0.5,
        sliding_window=spec.sliding_window or 0,
        softcap=NO_SOFTCAP,
        instruction_set="auto",
        threads=cpu_threads(),
    )
