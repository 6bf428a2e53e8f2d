"""Attention by the CPU kernels, on KV where it lies: in the cache of device cpu, or in the host pool."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.attention.backend import LayerWindows
from gpu_svc.kv_cache import KvShape
from gpu_svc.kv_layout import KvBlocks
from svc_common.cpu_kernels import Attention, DecodeWork, PrefillWork
from svc_common.decoder.dtypes import dtype_name
from svc_common.decoder.threads import cpu_threads
from svc_common.model.spec import ModelSpec


class CpuAttention:
    """The backend of device cpu."""

    reads_tails = False
    decode_on_device = None

    def __init__(self, spec: ModelSpec, shape: KvShape, dtype: torch.dtype) -> None:
        """`dtype` is the compute type."""
        self._windows = LayerWindows(spec)
        self._on_gpu = _by_window(self._windows, spec, shape.block_tokens, shape.dtype, dtype)
        self._on_host = self._on_gpu
        if shape.host_dtype != shape.dtype:
            self._on_host = _by_window(self._windows, spec, shape.block_tokens, shape.host_dtype, dtype)

    def decode(self, context_tokens: NDArray[np.int64], block_tables: NDArray[np.int32]) -> "_CpuDecode":
        context = context_tokens.astype(np.int32)
        return _CpuDecode(
            self._windows.by_layer(lambda window: DecodeWork(self._on_gpu[window], context, block_tables))
        )

    def prefill(self, start: int, num_tokens: int, blocks: NDArray[np.int32]) -> "_CpuPrefill":
        return _CpuPrefill(self._windows, self._on_gpu, self._on_host, start, num_tokens, blocks)


@dataclass(frozen=True, slots=True)
class _CpuDecode:
    by_layer: list[DecodeWork]

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        self.by_layer[layer].run(q, layer_blocks, out)


class _CpuPrefill:
    """Work is prepared for the tier whose turn comes."""

    def __init__(
        self,
        windows: LayerWindows,
        on_gpu: dict[int, Attention],
        on_host: dict[int, Attention],
        start: int,
        num_tokens: int,
        blocks: NDArray[np.int32],
    ) -> None:
        self._windows = windows
        self._on_gpu, self._on_host = on_gpu, on_host
        self._chunk = (start, num_tokens, blocks)

    @cached_property
    def _work(self) -> list[PrefillWork]:
        return self._windows.by_layer(lambda window: PrefillWork(self._on_gpu[window], *self._chunk))

    @cached_property
    def _host_work(self) -> list[PrefillWork]:
        return self._windows.by_layer(lambda window: PrefillWork(self._on_host[window], *self._chunk))

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        self._work[layer].run(q, layer_blocks, out)

    def run_on_host(self, layer: int, q: Tensor, layer_blocks: KvBlocks, kv: Tensor, out: Tensor) -> None:
        self._host_work[layer].run(q, layer_blocks.elements, out, layer_blocks.scales)


def _by_window(
    windows: LayerWindows, spec: ModelSpec, block_tokens: int, kv_dtype: torch.dtype, dtype: torch.dtype
) -> dict[int, Attention]:
    return {
        window: Attention(
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_tokens=block_tokens,
            kv_dtype=dtype_name(kv_dtype),
            exchange_dtype=dtype_name(dtype),
            softmax_scale=spec.softmax_scale,
            sliding_window=window,
            softcap=spec.attention_softcap,
            instruction_set="auto",
            threads=cpu_threads(),
        )
        for window in windows.distinct
    }
