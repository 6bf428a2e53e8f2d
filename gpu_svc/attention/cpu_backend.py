"""Attention by the CPU kernels, on KV where it lies: in the cache of device cpu, or in the host pool."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.dtypes import dtype_name
from gpu_svc.kv_cache import KvShape
from gpu_svc.threads import cpu_threads
from svc_common.cpu_kernels import NO_SOFTCAP, Attention, DecodeWork, PrefillWork
from svc_common.model.spec import ModelSpec


class CpuAttention:
    """The backend of device cpu."""

    def __init__(self, spec: ModelSpec, shape: KvShape, dtype: torch.dtype) -> None:
        """`dtype` is the compute type."""
        self._attention = Attention(
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_tokens=shape.block_tokens,
            kv_dtype=dtype_name(shape.dtype),
            exchange_dtype=dtype_name(dtype),
            softmax_scale=spec.head_dim**-0.5,
            sliding_window=spec.sliding_window or 0,
            softcap=NO_SOFTCAP,
            instruction_set="auto",
            threads=cpu_threads(),
        )

    def decode(self, context_tokens: NDArray[np.int64], block_tables: NDArray[np.int32]) -> DecodeWork:
        return DecodeWork(self._attention, context_tokens.astype(np.int32), block_tables)

    def prefill(self, start: int, num_tokens: int, blocks: NDArray[np.int32]) -> "_CpuPrefill":
        return _CpuPrefill(PrefillWork(self._attention, start, num_tokens, blocks))


@dataclass(frozen=True, slots=True)
class _CpuPrefill:
    work: PrefillWork

    def run(self, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        self.work.run(q, layer_blocks, out)

    def run_on_host(self, q: Tensor, layer_blocks: Tensor, kv: Tensor, out: Tensor) -> None:
        self.work.run(q, layer_blocks, out)
