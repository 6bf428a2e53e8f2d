"""Attention on the CPU against its floor and against torch, all in one run: `make bench-kernel`.

The floor of a decode is the larger of two times: its keys and values, read once at the rate of a plain sequential
read by the same threads, and its multiply-adds at the rate of fp32 multiply-adds in registers. The KV is larger than
the processor's caches, and layers take turns, as in serving. What is compared takes turns, too: each figure is the
median over rounds of a ratio within one round, so that a neighbour who takes part of the machine disturbs both sides.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from results import Row, arguments, publish
from torch import Tensor

from svc_common.cpu_kernels import (
    NO_SOFTCAP,
    Attention,
    DecodeWork,
    PrefillWork,
    ThreadPool,
    choose_instruction_set,
    fma_peak,
    read_ceiling,
)

BLOCK_TOKENS = 16
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
# All KV lies here, and the plain read reads it; far more than caches hold. 0x3c is a number of each type.
MEMORY = np.full(2**30, 0x3C, np.uint8)
# Layers take turns, so that each finds its KV in memory and not in the processor's caches.
WORKING_SET_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Heads:
    """One model's attention."""

    model: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.model} heads ({self.num_q_heads}/{self.num_kv_heads} x {self.head_dim})"


LLAMA_2 = Heads("Llama-2-7B", 32, 32, 128)
LLAMA_3 = Heads("Llama-3-8B", 32, 8, 128)
SMOLLM = Heads("SmolLM2-135M", 9, 3, 64)
FLOOR_TARGETS = {
    (LLAMA_2, "fp16"): 0.78,
    (LLAMA_3, "fp16"): 0.65,
    (LLAMA_3, "bf16"): 0.60,
    (SMOLLM, "fp16"): 0.60,
}
TORCH_TARGETS = {
    (LLAMA_3, "fp16"): 10.0,
    (LLAMA_3, "bf16"): 2.5,
    (LLAMA_3, "fp32"): 1.8,
    (LLAMA_2, "fp16"): 8.0,
}
PREFILL_TOKENS = 1024


class Decodes:
    """Eight sequences over as many layers as the working set takes."""

    def __init__(self, heads: Heads, dtype: str, context_tokens: int, threads: ThreadPool, num_sequences: int = 8):
        self.heads, self.context_tokens, self.num_sequences = heads, context_tokens, num_sequences
        self._dtype = DTYPES[dtype]
        blocks_each = -(-context_tokens // BLOCK_TOKENS)
        num_blocks = num_sequences * blocks_each
        shape = (num_blocks, 2, heads.num_kv_heads, BLOCK_TOKENS * heads.head_dim)
        self.layer_bytes = int(np.prod(shape)) * self._dtype.itemsize
        num_layers = max(1, WORKING_SET_BYTES // self.layer_bytes)
        memory = torch.from_numpy(MEMORY[: num_layers * self.layer_bytes])
        self._layers = memory.view(self._dtype).view(num_layers, *shape).unbind()
        self._turn = cycle(self._layers)
        # For int8. Their own memory is little and counts for nothing.
        scales_shape = (num_layers, num_blocks, 2, heads.num_kv_heads)
        scales = torch.full(scales_shape, 0.01).unbind() if dtype == "int8" else [None] * num_layers
        self._scales = cycle(scales)
        exchange_dtype = torch.float32 if dtype == "int8" else self._dtype
        self._q = torch.randn(num_sequences, heads.num_q_heads, heads.head_dim).to(exchange_dtype)
        self._out = torch.empty_like(self._q)
        tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(num_sequences, -1)
        self._work = DecodeWork(
            make_attention(heads, dtype, threads), np.full(num_sequences, context_tokens, np.int32), tables
        )

    @property
    def multiply_adds(self) -> int:
        """Of one layer: scores, then weighted values."""
        return 2 * self.num_sequences * self.context_tokens * self.heads.num_q_heads * self.heads.head_dim

    def run(self) -> None:
        self._work.run(self._q, next(self._turn), self._out, next(self._scales))

    def sdpa(self) -> list[Callable[[], Tensor]]:
        """torch on the same memory, read as contiguous KV: groups by `enable_gqa`, and folded into the query axis."""
        heads, n = self.heads, self.num_sequences
        group = heads.num_q_heads // heads.num_kv_heads
        kv_shape = (2, n, heads.num_kv_heads, -1, heads.head_dim)
        q = self._q.unsqueeze(2)
        folded = self._q.view(n, heads.num_kv_heads, group, heads.head_dim)

        def by_gqa() -> Tensor:
            k, v = next(self._turn).view(kv_shape)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=group > 1)

        def by_folding() -> Tensor:
            k, v = next(self._turn).view(kv_shape)
            return F.scaled_dot_product_attention(folded, k, v)

        return [by_gqa, by_folding] if group > 1 else [by_gqa]


def make_attention(heads: Heads, dtype: str, threads: ThreadPool) -> Attention:
    return Attention(
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_tokens=BLOCK_TOKENS,
        kv_dtype=dtype,
        exchange_dtype="fp32" if dtype == "int8" else dtype,
        softmax_scale=heads.head_dim**-0.5,
        sliding_window=0,
        softcap=NO_SOFTCAP,
        instruction_set="auto",
        threads=threads,
    )


def least_s(run: Callable[[], object], total_s: float) -> float:
    """The least of as many runs as `total_s` takes, at least two: what disturbs a run only ever adds."""
    best, end = float("inf"), time.perf_counter() + total_s
    for num_runs in count(1):
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if num_runs >= 2 and now >= end:
            break
    return best


def floor_rows(threads: ThreadPool, rounds: int) -> Iterator[Row]:
    """Each case's share of its floor, ceiling and peak measured again in each round."""
    contexts = (2048, 8192)
    for heads in (LLAMA_2, LLAMA_3, SMOLLM):
        for dtype in ("fp16", "bf16", "fp32", "int8"):
            for context_tokens in contexts:
                if (heads, dtype, context_tokens) == (LLAMA_2, "fp32", 8192):
                    continue  # larger than the memory
                decodes = Decodes(heads, dtype, context_tokens, threads)
                decodes.run()
                shares, rates, bound = [], [], ""
                for _ in range(rounds):
                    ceiling, peak = read_ceiling(threads, MEMORY, 3), fma_peak(threads, 3)
                    layer_s = least_s(decodes.run, 0.2)
                    memory_s, arithmetic_s = decodes.layer_bytes / ceiling, decodes.multiply_adds / peak
                    if dtype == "int8":
                        arithmetic_s = 0.0  # Its multiply-adds are of 16-bit integers, at a rate that nobody measures.
                    shares.append(max(memory_s, arithmetic_s) / layer_s)
                    rates.append(decodes.layer_bytes / layer_s)
                    bound = "memory" if memory_s >= arithmetic_s else "arithmetic"
                yield Row(
                    f"{heads} {dtype}, 8 x {context_tokens}",
                    statistics.median(shares),
                    "floor / kernel",
                    FLOOR_TARGETS.get((heads, dtype)),
                    detail=f"{statistics.median(rates) / 1e9:.1f} GB/s, bound by {bound}",
                )


def torch_rows(threads: ThreadPool, rounds: int) -> Iterator[Row]:
    for heads in (LLAMA_3, LLAMA_2):
        for dtype in ("fp16", "bf16", "fp32"):
            decodes = Decodes(heads, dtype, 2048, threads)
            ways = decodes.sdpa()
            for run in (decodes.run, *ways):
                run()
            gains, kernel_s, torch_s = [], [], []
            for _ in range(rounds):
                kernel_s.append(least_s(decodes.run, 0.15))
                torch_s.append(min(least_s(run, 0.15) for run in ways))
                gains.append(torch_s[-1] / kernel_s[-1])
            yield Row(
                f"{heads} {dtype}, 8 x 2048",
                statistics.median(gains),
                "kernel / torch SDPA, speed",
                TORCH_TARGETS.get((heads, dtype)),
                detail=f"{statistics.median(kernel_s) * 1e3:.2f} against {statistics.median(torch_s) * 1e3:.2f} ms",
            )


def scaling_rows(rounds: int) -> Iterator[Row]:
    """What a second thread gives, over what it gives the plain read."""
    pools = [ThreadPool(1), ThreadPool(2)]
    for heads, dtype in ((LLAMA_2, "fp16"), (LLAMA_3, "fp16")):
        both = [Decodes(heads, dtype, 2048, pool) for pool in pools]
        gains, kernel_gains = [], []
        for _ in range(rounds):
            one, two = (read_ceiling(pool, MEMORY, 3) for pool in pools)
            one_s, two_s = (least_s(decodes.run, 0.15) for decodes in both)
            kernel_gains.append(one_s / two_s)
            gains.append(one_s / two_s / (two / one))
        yield Row(
            f"{heads} {dtype}, one thread to two",
            statistics.median(gains),
            "kernel's gain / read ceiling's gain",
            0.95,
            detail=f"{statistics.median(kernel_gains):.2f} times as fast",
        )


def prefill_rows(threads: ThreadPool, rounds: int) -> Iterator[Row]:
    """Causal attention of a whole prompt, from blocks, beside torch's from contiguous tensors of fp32."""
    for heads in (LLAMA_3, SMOLLM):
        num_blocks = PREFILL_TOKENS // BLOCK_TOKENS
        q = torch.randn(PREFILL_TOKENS, heads.num_q_heads, heads.head_dim)
        out, table = torch.empty_like(q), np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        layer = torch.randn(num_blocks, 2, heads.num_kv_heads, BLOCK_TOKENS * heads.head_dim)
        work = PrefillWork(make_attention(heads, "fp32", threads), 0, PREFILL_TOKENS, table)
        by_head = q.transpose(0, 1).contiguous()[None]
        k, v = layer.view(2, 1, heads.num_kv_heads, PREFILL_TOKENS, heads.head_dim)

        def native(work: PrefillWork = work, q: Tensor = q, layer: Tensor = layer, out: Tensor = out) -> None:
            work.run(q, layer, out)

        def sdpa(q: Tensor = by_head, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        native()
        sdpa()
        pairs = [(least_s(native, 0.15), least_s(sdpa, 0.15)) for _ in range(rounds)]
        yield Row(
            f"{heads} fp32, prompt of {PREFILL_TOKENS}",
            statistics.median(torch_s / native_s for native_s, torch_s in pairs),
            "kernel / torch SDPA, speed",
            1.0,
            detail=f"{statistics.median(native_s for native_s, _ in pairs) * 1e3:.1f} against "
            f"{statistics.median(torch_s for _, torch_s in pairs) * 1e3:.1f} ms",
        )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; figures are rough")
    options = parser.parse_args()
    num_threads = min(2, len(os.sched_getaffinity(0)))
    rounds = 1 if options.quick else 3
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    threads = ThreadPool(num_threads)
    rows = [*floor_rows(threads, rounds), *torch_rows(threads, rounds), *prefill_rows(threads, rounds)]
    if num_threads == 2:
        rows += scaling_rows(rounds)
    ceiling, peak = read_ceiling(threads, MEMORY, 3), fma_peak(threads, 3)
    about = (
        f"Decode attention of 8 sequences, {num_threads} threads, kernels for {choose_instruction_set('auto')}, "
        f"blocks of {BLOCK_TOKENS} tokens anywhere in memory. Read ceiling {ceiling / 1e9:.1f} GB/s, "
        f"peak {peak / 1e9:.0f} billion fp32 multiply-adds a second."
    )
    print(about)
    publish("kernel", "Attention on the CPU", "make bench-kernel", about, rows, options.publish)


if __name__ == "__main__":
    main()
