"""Attention by the CPU kernels, on KV where it lies: in the cache of device cpu, or in the host pool."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.attention.backend import LayerWindows
from gpu_svc.dtypes import dtype_name
from gpu_svc.kv_cache import KvShape
from gpu_svc.threads import cpu_threads
from svc_common.cpu_kernels import Attention, DecodeWork, PrefillWork
from svc_common.model.spec import ModelSpec


class CpuAttention:
    """The backend of device cpu."""

    def __init__(self, spec: ModelSpec, shape: KvShape, dtype: torch.dtype) -> None:
        """`dtype` is the compute type."""
        self._windows = LayerWindows(spec)
        self._of_window = {
            window: Attention(
                num_q_heads=spec.num_q_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                block_tokens=shape.block_tokens,
                kv_dtype=dtype_name(shape.dtype),
                exchange_dtype=dtype_name(dtype),
                softmax_scale=spec.softmax_scale,
                sliding_window=window,
                softcap=spec.attention_softcap,
                instruction_set="auto",
                threads=cpu_threads(),
            )
            for window in self._windows.distinct
        }

    def decode(self, context_tokens: NDArray[np.int64], block_tables: NDArray[np.int32]) -> "_CpuDecode":
        context = context_tokens.astype(np.int32)
        return _CpuDecode(
            self._windows.by_layer(lambda window: DecodeWork(self._of_window[window], context, block_tables))
        )

    def prefill(self, start: int, num_tokens: int, blocks: NDArray[np.int32]) -> "_CpuPrefill":
        return _CpuPrefill(
            self._windows.by_layer(lambda window: PrefillWork(self._of_window[window], start, num_tokens, blocks))
        )


@dataclass(frozen=True, slots=True)
class _CpuDecode:
    by_layer: list[DecodeWork]

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        self.by_layer[layer].run(q, layer_blocks, out)


@dataclass(frozen=True, slots=True)
class _CpuPrefill:
    by_layer: list[PrefillWork]

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        self.by_layer[layer].run(q, layer_blocks, out)

    def run_on_host(self, layer: int, q: Tensor, layer_blocks: Tensor, kv: Tensor, out: Tensor) -> None:
        self.by_layer[layer].run(q, layer_blocks, out)
