"""Runs plans: state changes, swaps, layers, sampling. One thread; knows nothing of gRPC.

The state of an epoch lives in `_Epoch`; a failure ends it, and plans are refused until a new one is opened.
"""

import logging
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpu_svc.attention import TorchAttention
from gpu_svc.batch import Batch, BatchBuilder
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache, KvShape, copy_blocks
from gpu_svc.model.decoder import Decoder
from gpu_svc.pipeline import Stage, outputs, run_layers
from gpu_svc.plan import (
    ErrorKind,
    InvalidPlanError,
    IterationPlan,
    IterationResult,
    Limits,
    Tier,
    Timings,
    TokenLogprobs,
)
from gpu_svc.sampling import sample
from gpu_svc.sequences import BlockMoves, Moves, SequenceTable
from svc_common.tensor_plane import PlaneError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """What the executor holds right now."""

    epoch: int
    last_iteration: int
    num_sequences: int
    gpu_blocks_used: int
    host_blocks_used: int
    weight_bytes: int
    gpu_kv_bytes: int
    cpu_attention_attached: bool


class Executor:
    """One model on one device. All methods but `status` belong to one thread."""

    def __init__(self, decoder: Decoder, kv_shape: KvShape, gpu_kv_bytes: int) -> None:
        self.decoder = decoder
        self.kv_shape = kv_shape
        self._gpu_kv_cap_bytes = gpu_kv_bytes
        self._epoch: _Epoch | None = None
        self._last_epoch = 0
        self._last_end_ns = 0
        self._weight_bytes = decoder.weights.num_bytes

    @property
    def last_epoch(self) -> int:
        """Number of the newest epoch ever opened; 0 before the first."""
        return self._last_epoch

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks that fit under the cap."""
        return self._gpu_kv_cap_bytes // self.kv_shape.block_bytes

    def close_epoch(self) -> None:
        """Drops all sequences, the cache and the host tier; plans are stale until `open_epoch`."""
        if self._epoch is not None and self._epoch.host is not None:
            self._epoch.host.close()
        self._epoch = None

    def open_epoch(self, epoch: int, limits: Limits, host: HostTier | None) -> "Resources":
        """Starts afresh. The old epoch must be closed: both caches at once would exceed the caps."""
        assert self._epoch is None
        cache = GpuKvCache(self.kv_shape, self._gpu_kv_cap_bytes, self.decoder.device)
        self._epoch = _Epoch(epoch, limits, self.decoder, cache, host)
        self._last_epoch = epoch
        self._last_end_ns = time.perf_counter_ns()
        return self._epoch.resources

    def status(self) -> Status:
        """Safe from any thread: reads single values that may be one iteration apart."""
        epoch = self._epoch
        if epoch is None:
            return Status(self._last_epoch, 0, 0, 0, 0, self._weight_bytes, 0, False)
        return Status(
            epoch=epoch.number,
            last_iteration=epoch.last_iteration,
            num_sequences=len(epoch.table.slot_of),
            gpu_blocks_used=epoch.table.owned[Tier.GPU].num_used,
            host_blocks_used=epoch.table.owned[Tier.HOST].num_used,
            weight_bytes=self._weight_bytes,
            gpu_kv_bytes=epoch.resources.cache.num_bytes,
            cpu_attention_attached=epoch.host is not None and epoch.host.is_alive,
        )

    @torch.inference_mode()
    def run(self, plan: IterationPlan) -> IterationResult:
        """Never raises for what a plan, the CPU attention service or the device can do wrong: the result says it."""
        start_ns = time.perf_counter_ns()
        idle_ns = start_ns - self._last_end_ns
        epoch = self._epoch
        if epoch is None or plan.epoch != epoch.number:
            return _failure(plan, ErrorKind.STALE, f"epoch {plan.epoch} is not open")
        try:
            result = epoch.run(plan)
        except InvalidPlanError as error:
            return self.fail(plan, ErrorKind.INVALID_PLAN, str(error))
        except PlaneError as error:
            return self.fail(plan, ErrorKind.CPU_ATTENTION_LOST, str(error))
        except Exception as error:
            logger.exception("iteration %d failed", plan.iteration)
            return self.fail(plan, ErrorKind.DEVICE, f"{type(error).__name__}: {error}")
        end_ns = time.perf_counter_ns()
        self._last_end_ns = end_ns
        return replace(result, timings=replace(result.timings, total_ns=end_ns - start_ns, idle_ns=idle_ns))

    def fail(self, plan: IterationPlan, kind: ErrorKind, message: str) -> IterationResult:
        """Ends the epoch; closing the plane also ends what the CPU attention service still waits for."""
        logger.error("epoch %d ends at iteration %d: %s: %s", plan.epoch, plan.iteration, kind.value, message)
        self.close_epoch()
        return _failure(plan, kind, message)


@dataclass(frozen=True, slots=True)
class Resources:
    """What an epoch computes with; the profiler measures the same."""

    limits: Limits
    decoder: Decoder
    cache: GpuKvCache
    host: HostTier | None
    backend: TorchAttention


class _Epoch:
    """Sequences, caches and batches of one epoch."""

    def __init__(self, number: int, limits: Limits, decoder: Decoder, cache: GpuKvCache, host: HostTier | None) -> None:
        self.number = number
        self.last_iteration = 0
        self.host = host
        self.resources = Resources(
            limits,
            decoder,
            cache,
            host,
            TorchAttention(decoder.spec, cache.shape.block_tokens, decoder.dtype, decoder.device),
        )
        self.table = SequenceTable(limits, cache.shape.block_tokens, cache.num_blocks, host.num_blocks if host else 0)
        self._builder = BatchBuilder(self.table, self.resources.backend, cache.shape, decoder.device)
        self._announced_host_blocks = 0

    def run(self, plan: IterationPlan) -> IterationResult:
        """One iteration, start to end."""
        if plan.iteration != self.last_iteration + 1:
            raise InvalidPlanError(f"iteration {plan.iteration} follows {self.last_iteration}")
        if self.host is not None and not self.host.is_alive:
            raise PlaneError("the CPU attention service is gone")
        moves = self.table.apply(plan)
        self.table.check_work(plan)
        swap_ns = self._swap(moves)
        batches = [
            self._builder.build(sub_batch, index)
            for index, sub_batch in enumerate(plan.sub_batches)
            if sub_batch.num_tokens
        ]
        waited_before_ns = self.host.wait_ns if self.host else 0
        stages, cpu_attention_ns = self._run_layers(batches, plan.host_blocks_used)
        for sub_batch in plan.sub_batches:
            self.table.advance(sub_batch)
        tokens, logprobs, head_ns = self._sample(stages)
        self.last_iteration = plan.iteration
        shape = self.resources.cache.shape
        host_chunk_tokens = sum(
            chunk.rows.stop - chunk.rows.start for batch in batches for chunk in batch.chunks if chunk.on_host
        )
        return IterationResult(
            epoch=plan.epoch,
            iteration=plan.iteration,
            tokens=tokens,
            logprobs=logprobs,
            timings=Timings(
                cpu_wait_ns=self.host.wait_ns - waited_before_ns if self.host else 0,
                cpu_attention_ns=cpu_attention_ns,
                swap_ns=swap_ns,
                head_ns=head_ns,
            ),
            swapped_out_bytes=len(moves.to_host.source) * shape.block_bytes + host_chunk_tokens * shape.token_bytes,
            swapped_in_bytes=len(moves.to_gpu.source) * shape.block_bytes,
            gpu_attended_tokens=sum(batch.gpu_attended_tokens for batch in batches),
            cpu_attended_tokens=sum(batch.cpu_attended_tokens for batch in batches),
        )

    def _swap(self, moves: Moves) -> int:
        """All moves to the host, then all to the GPU, which may reuse the blocks. Nanoseconds."""
        start_ns = time.perf_counter_ns()
        if self.host is not None:
            _copy(self.resources.cache.blocks, self.host.blocks, moves.to_host)
            _copy(self.host.blocks, self.resources.cache.blocks, moves.to_gpu)
        return time.perf_counter_ns() - start_ns

    def _run_layers(self, batches: list[Batch], host_blocks_used: int) -> tuple[list[Stage], int]:
        """The sub-batches after the last layer, and nanoseconds the CPU attention service computed."""
        # Sub-batch 1 is submitted first in each layer, see pipeline.py.
        cpu_work = [batch.cpu_work for batch in reversed(batches) if len(batch.cpu_work)]
        if self.host is not None and (cpu_work or host_blocks_used != self._announced_host_blocks):
            self.host.begin(cpu_work, host_blocks_used)
            self._announced_host_blocks = host_blocks_used
        stages = [Stage(batch, self.resources.decoder, self.resources.cache, self.host) for batch in batches]
        if stages:
            second = stages[1] if len(stages) == 2 else None
            run_layers(stages[0], second, self.resources.decoder.spec.num_layers)
        cpu_attention_ns = self.host.finish().compute_ns if self.host is not None and cpu_work else 0
        return stages, cpu_attention_ns

    def _sample(self, stages: list[Stage]) -> tuple[tuple[tuple[int, int], ...], tuple[TokenLogprobs, ...], int]:
        """Tokens by sequence id, log-probabilities, and nanoseconds of head and sampling."""
        start_ns = time.perf_counter_ns()
        slots = np.concatenate([np.zeros(0, np.int64), *(stage.batch.output_slots for stage in stages)])
        if not len(slots):
            return (), (), 0
        logits = self.resources.decoder.logits(outputs(stages))
        tokens, logprobs = sample(logits, self.table.sampling_rows(slots))
        self.table.take_tokens(slots, tokens)
        ids = self.table.sequence_ids[slots].tolist()
        return (
            tuple(zip(ids, tokens.tolist(), strict=True)),
            tuple(TokenLogprobs(ids[row.row], row.chosen, row.top) for row in logprobs),
            time.perf_counter_ns() - start_ns,
        )


def _copy(source: torch.Tensor, target: torch.Tensor, moves: BlockMoves) -> None:
    copy_blocks(source, torch.from_numpy(moves.source), target, torch.from_numpy(moves.target))


def _failure(plan: IterationPlan, kind: ErrorKind, message: str) -> IterationResult:
    return IterationResult(plan.epoch, plan.iteration, error=kind, error_message=message)
