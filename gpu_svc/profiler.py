"""Measures each operation once per start, on the epoch's own caches and through the real tensor plane.

Runs before the epoch's first plan, when no block holds anything. A grid ends early where a point takes long: beyond
it, time is linear in what still grows, and start-up must not take minutes.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from gpu_svc.attention import AttentionBackend, DecodeAttention
from gpu_svc.batch import BatchBuilder
from gpu_svc.host_tier import CpuWork, HostTier
from gpu_svc.kv_cache import GpuKvCache, copy_blocks
from gpu_svc.limits import Int32Array, Limits
from gpu_svc.model.decoder import Decoder, Workspace
from gpu_svc.pipeline import Stage
from gpu_svc.sampling import SamplingRows, sample
from gpu_svc.sequences import SequenceTable
from svc_common.model.spec import LayerSpec
from svc_common.plan import IterationPlan, Mode, NewSequence, SubBatch, Tier

# A point is repeated until it has cost this much, but at least _MIN_RUNS and at most _MAX_RUNS times.
_POINT_S = 0.02
_MIN_RUNS, _MAX_RUNS = 3, 15
# A point this long is run twice only, and is the last of its row where rows may end early.
_LONG_S = 0.05
_SWAP_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Tables:
    """Seconds, as OperationTables of the proto; a table is empty where its operation cannot run."""

    linear: tuple[tuple[int, float], ...]
    """(num_tokens, one layer)"""
    prefill: tuple[tuple[int, int, float], ...]
    """(chunk_tokens, past_tokens, one layer)"""
    gpu_decode: tuple[tuple[int, int, float], ...]
    """(num_sequences, context_tokens of all, one layer)"""
    cpu_decode: tuple[tuple[int, int, float], ...]
    """(num_sequences, context_tokens of all, one layer from submit to wait)"""
    head: tuple[tuple[int, float], ...]
    """(num_outputs, one iteration)"""
    swap_bytes_per_s: float
    iteration_s: float


@dataclass(frozen=True, slots=True)
class Profiler:
    """Over the parts of one epoch."""

    limits: Limits
    decoder: Decoder
    cache: GpuKvCache
    host: HostTier | None
    backend: AttentionBackend

    @torch.inference_mode()
    def measure(self) -> Tables:
        return Tables(
            linear=tuple(self._linear()),
            prefill=tuple(self._prefill()),
            gpu_decode=tuple(self._gpu_decode()),
            cpu_decode=tuple(self._cpu_decode()),
            head=tuple(self._head()),
            swap_bytes_per_s=self._swap_bytes_per_s(),
            iteration_s=self._iteration_s(),
        )

    def _linear(self) -> Iterator[tuple[int, float]]:
        spec = self.decoder.spec
        for num_tokens in _steps(1, self.limits.max_batch_tokens, 2):
            hidden = self._noise(num_tokens, spec.hidden_size)
            workspace = self.decoder.workspace(torch.arange(num_tokens, device=self.decoder.device))
            attended = self._noise(num_tokens, spec.num_q_heads, spec.head_dim)
            yield num_tokens, self._layer_s(partial(self._run_linear, hidden, workspace, attended))

    def _run_linear(self, hidden: Tensor, workspace: Workspace, attended: Tensor, layer: int) -> None:
        self.decoder.pre_attention(layer, hidden, workspace)
        self.decoder.post_attention(layer, attended, hidden)

    def _prefill(self) -> Iterator[tuple[int, int, float]]:
        spec, block_tokens = self.decoder.spec, self.cache.shape.block_tokens
        longest = min(self.limits.max_batch_tokens, self.limits.max_sequence_tokens)
        layer_blocks = self.cache.blocks[0]
        if not self.cache.num_blocks:
            layer_blocks = self._noise(1, *self.cache.blocks.shape[2:]).to(self.cache.shape.dtype)
        for chunk_tokens in _steps(min(16, longest), longest, 4):
            q = self._noise(chunk_tokens, spec.num_q_heads, spec.head_dim)
            out = torch.empty_like(q)
            most_past = self.limits.max_sequence_tokens - chunk_tokens
            for past_tokens in (0, *_steps(min(256, most_past), most_past, 4)) if most_past else (0,):
                num_blocks = -(-(past_tokens + chunk_tokens) // block_tokens)
                # More blocks than there are: repeated ones cost the same.
                blocks = (np.arange(num_blocks) % len(layer_blocks)).astype(np.int32)
                attention = self.backend.prefill(past_tokens, chunk_tokens, blocks)
                seconds = self._layer_s(partial(attention.run, q=q, layer_blocks=layer_blocks, out=out))
                yield chunk_tokens, past_tokens, seconds
                if seconds > _LONG_S:
                    break

    def _gpu_decode(self) -> Iterator[tuple[int, int, float]]:
        spec = self.decoder.spec
        for num_sequences, context_tokens, tables in self._decode_grid(self.cache.num_blocks):
            q = self._noise(num_sequences, spec.num_q_heads, spec.head_dim)
            out = torch.empty_like(q)
            attention = self.backend.decode(np.full(num_sequences, context_tokens, np.int64), tables)
            seconds = self._layer_s(partial(self._run_decode, attention, q, out))
            yield num_sequences, num_sequences * context_tokens, seconds

    def _run_decode(self, attention: DecodeAttention, q: Tensor, out: Tensor, layer: int) -> None:
        attention.run(layer, q, self.cache.blocks[layer], out)

    def _cpu_decode(self) -> Iterator[tuple[int, int, float]]:
        spec, host = self.decoder.spec, self.host
        if host is None:
            return
        for num_sequences, context_tokens, tables in self._decode_grid(host.num_blocks):
            q = self._noise(num_sequences, spec.num_q_heads, spec.head_dim)
            kv = self._noise(num_sequences, 2, spec.num_kv_heads, spec.head_dim)
            out = torch.empty_like(q)
            host.begin([CpuWork(0, np.full(num_sequences, context_tokens, np.int32), tables)], 0)
            times: list[float] = []
            for _ in range(spec.num_layers):
                start = time.perf_counter()
                host.submit(0, q, kv, slice(0, num_sequences))
                host.wait(0, out, slice(0, num_sequences))
                times.append(time.perf_counter() - start)
            host.finish()
            yield num_sequences, num_sequences * context_tokens, self._mean(partial(_median_of, times))

    def _decode_grid(self, num_blocks: int) -> Iterator[tuple[int, int, Int32Array]]:
        """(num_sequences, context tokens of each, block tables) up to what the tier holds."""
        block_tokens = self.cache.shape.block_tokens
        for num_sequences in _steps(1, min(self.limits.max_sequences, self.limits.max_batch_tokens, num_blocks), 4):
            blocks_each = num_blocks // num_sequences
            longest = min(self.limits.max_sequence_tokens, blocks_each * block_tokens)
            for context_tokens in _steps(min(block_tokens, longest), longest, 8):
                width = -(-context_tokens // block_tokens)
                tables = np.arange(num_sequences)[:, None] * blocks_each + np.arange(width)
                yield num_sequences, context_tokens, tables.astype(np.int32)

    def _head(self) -> Iterator[tuple[int, float]]:
        """With sampling at temperature 1, the default of requests."""
        for num_outputs in _steps(1, min(self.limits.max_sequences, self.limits.max_batch_tokens), 4):
            hidden = self._noise(num_outputs, self.decoder.spec.hidden_size)
            rows = _default_rows(num_outputs)
            seconds = self._least_s(partial(self._run_head, hidden, rows))
            yield num_outputs, seconds

    def _run_head(self, hidden: Tensor, rows: SamplingRows) -> None:
        sample(self.decoder.logits(hidden), rows)

    def _swap_bytes_per_s(self) -> float:
        """There and back. 0 where there is no second tier."""
        if self.host is None or not self.cache.num_blocks:
            return 0.0
        block_bytes = self.cache.shape.block_bytes
        num_blocks = min(self.cache.num_blocks, self.host.num_blocks, max(1, _SWAP_BYTES // block_bytes))
        blocks, gpu, host = torch.arange(num_blocks), self.cache.blocks, self.host.blocks

        def there_and_back() -> None:
            copy_blocks(gpu, blocks, host, blocks)
            copy_blocks(host, blocks, gpu, blocks)

        return 2 * num_blocks * block_bytes / self._least_s(there_and_back)

    def _iteration_s(self) -> float:
        """Taking a plan over and building its batch, for as many sequences as commonly run."""
        num_sequences = min(32, self.limits.max_sequences, self.limits.max_batch_tokens)
        table = SequenceTable(
            Limits(num_sequences, num_sequences, 2),
            self.cache.shape.block_tokens,
            2 * num_sequences,
            0,
            self.decoder.spec.vocab_size,
        )
        new = tuple(NewSequence(i, (0,), Tier.GPU, (2 * i, 2 * i + 1)) for i in range(num_sequences))
        table.apply(IterationPlan(1, 1, Mode.GPU_ONLY, new_sequences=new))
        table.computed_tokens[:] = 1
        builder = BatchBuilder(table, self.backend, self.cache.shape, self.decoder.device)
        work = SubBatch(gpu_decodes=tuple(range(num_sequences)))
        plan = IterationPlan(1, 2, Mode.GPU_ONLY, sub_batches=(work,))

        def run() -> None:
            table.apply(plan)
            table.check_work(plan)
            Stage(builder.build(work, 0), self.decoder, self.cache, None)

        return self._least_s(run)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32).to(device=self.decoder.device, dtype=self.decoder.dtype)

    def _layer_s(self, run: Callable[[int], object]) -> float:
        """What `run` takes in a layer, layer after layer, so that weights come from memory as in an iteration."""

        def kind_s(layers: list[int]) -> float:
            order = cycle(layers)
            return self._least_s(lambda: run(next(order)))

        return self._mean(kind_s)

    def _mean(self, kind_s: Callable[[list[int]], float]) -> float:
        """Over all layers, of what those of each kind take: layers may differ in windows and in experts."""
        spec = self.decoder.spec
        kinds: dict[LayerSpec, list[int]] = {}
        for layer in range(spec.num_layers):
            kinds.setdefault(spec.layer(layer), []).append(layer)
        return sum(len(layers) * kind_s(layers) for layers in kinds.values()) / spec.num_layers

    def _least_s(self, run: Callable[[], object]) -> float:
        """The least of several runs: what disturbs a measurement only ever adds."""
        first_s = self._seconds(run)  # Kernels are chosen and buffers made on the first call.
        if first_s > _LONG_S:
            return min(first_s, self._seconds(run))
        times: list[float] = []
        while len(times) < _MIN_RUNS or (sum(times) < _POINT_S and len(times) < _MAX_RUNS):
            times.append(self._seconds(run))
        return min(times)

    def _seconds(self, run: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)


def _median_of(times: list[float], layers: list[int]) -> float:
    return statistics.median(times[layer] for layer in layers)


def _steps(first: int, last: int, factor: int) -> Iterator[int]:
    """first, first * factor, ..., last; nothing where last is below 1."""
    value = first
    while 0 < value < last:
        yield value
        value *= factor
    if last > 0:
        yield last


def _default_rows(num_rows: int) -> SamplingRows:
    return SamplingRows(
        temperature=np.ones(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.arange(num_rows, dtype=np.uint64),
        draw=np.zeros(num_rows, np.int64),
        num_logprobs=np.full(num_rows, -1, np.int32),
    )
