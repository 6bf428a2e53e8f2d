"""What the kernels' tests run with: all instruction sets that are compiled, those that can't run here skipped."""

from dataclasses import dataclass

import pytest

from support.cpu_attention import TOLERANCE
from svc_common import cpu_kernels
from svc_common.cpu_kernels import Attention, ThreadPool

DTYPES = ["fp32", "fp16", "bf16"]
KV_DTYPES = [*DTYPES, "int8"]

RUNNABLE = cpu_kernels.runnable_instruction_sets()

EACH_INSTRUCTION_SET = pytest.mark.parametrize(
    "instruction_set",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(name not in RUNNABLE, reason=f"NOT TESTED: this processor has no {name}"),
        )
        for name in cpu_kernels.compiled_instruction_sets()
    ],
)


INT16_TOLERANCE = 3e-4


@dataclass(frozen=True)
class Case:
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_tokens: int = 16
    window: int = 0
    softcap: float = 0.0
    kv_dtype: str = "fp32"
    exchange_dtype: str = "fp32"
    scale: float | None = None

    @property
    def softmax_scale(self) -> float:
        return self.scale or self.head_dim**-0.5

    def attention(self, instruction_set: str, num_threads: int) -> Attention:
        return Attention(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            kv_dtype=self.kv_dtype,
            exchange_dtype=self.exchange_dtype,
            softmax_scale=self.softmax_scale,
            sliding_window=self.window,
            softcap=self.softcap,
            instruction_set=instruction_set,
            threads=ThreadPool(num_threads),
        )

    @property
    def atol(self) -> float:
        """Of outputs of about 1. A score's rounding, in proportion to the score or its cap, goes into its weight."""
        exact = TOLERANCE[self.exchange_dtype] + 4e-7 * self.softcap + 8e-6 * (self.scale or 0.0)
        # Queries and weights are rounded to 16 bits then.
        return exact + (INT16_TOLERANCE * max(1.0, 4 * (self.scale or 0.0)) if self.kv_dtype == "int8" else 0.0)
