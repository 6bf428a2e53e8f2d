"""One model on one device, through its epochs: runs plans, turns what goes wrong into results. Knows no gRPC."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from gpu_svc.device_memory import DeviceMemory, DoesNotFitError
from gpu_svc.epoch import Epoch, nobody
from gpu_svc.grammars import Grammars
from gpu_svc.graph_options import GraphOptions, why_eager
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache, KvShape
from gpu_svc.limits import InvalidPlanError, Limits
from gpu_svc.link import Link
from gpu_svc.lower_pool import num_gpu_blocks
from gpu_svc.placed_decoder import PlacedDecoder
from gpu_svc.recorder import NO_RECORDER, Recorder
from gpu_svc.tables import Tables
from svc_common.decoder.decoder import Decoder
from svc_common.plan import ExecutionError, IterationPlan, IterationResult, Tier
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import PlaneError
from svc_common.trace import IterationTrace, TraceKind

if TYPE_CHECKING:  # It needs Status, by way of wire.py.
    from gpu_svc.table_cache import TableCache

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
    """On the device."""
    gpu_kv_bytes: int
    cpu_attention_attached: bool
    resident_layers: int = 0
    streamed_bytes: int = 0
    """Of weights that cross the link in each iteration."""


class Executor:
    """A failure ends the epoch: plans are stale until a new one is opened.

    All methods but `status` belong to one thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_shape: KvShape,
        gpu_kv_bytes: int,
        table_cache: "TableCache | None" = None,
        grammars: Grammars | None = None,
        link: Link | None = None,
        host_kv_bytes: int = 0,
        graphs: GraphOptions | None = None,
        sized_for: tuple[Limits, Callable[[Limits], int]] | None = None,
    ) -> None:
        """`gpu_kv_bytes` caps the GPU's KV cache, `host_kv_bytes` is what the CPU attention services have for KV.
        `sized_for`: the limits by which the device's memory was divided, and what activations take at most by others.

        Without `table_cache` operations are measured each time, without `grammars` no sequence may have one. Layers can
        be streamed where `decoder` is a PlacedDecoder; any other has all of them on the device. Swaps cross `link`, by
        default one that is as fast as copies go. Without `graphs` no iteration is captured.
        """
        self.decoder = decoder
        self.kv_shape = kv_shape
        self.grammars = grammars
        self.last_epoch = 0
        self.link_bytes_per_s = 0.0
        """As it was measured; 0 before it was."""
        self._placed = decoder if isinstance(decoder, PlacedDecoder) else None
        self.resident_layers = decoder.spec.num_layers
        self.streamed_layers = range(0)
        self.weight_bytes = decoder.weight_bytes
        if self._placed:
            self._note_placement(self._placed.memory.most_resident(), 0)
        self._link = link or Link()
        self._gpu_kv_cap_bytes = gpu_kv_bytes
        self._host_kv_bytes = host_kv_bytes
        self._sized_for = sized_for
        self._table_cache = table_cache
        self._graphs = graphs
        self._epoch: Epoch | None = None
        self._last_end_ns = 0
        self._recorder = Recorder(decoder.spec.num_layers)

    def fitting(self, policy: ExecutionPolicy) -> ExecutionPolicy:
        """The policy, with fewer resident layers where so many don't fit. Raises DoesNotFitError where none do."""
        if self._placed is None:
            return policy
        first = min(policy.prefill_cpu_layers, policy.decode_cpu_layers)
        most = self._placed.memory.most_resident(first)
        return replace(policy, resident_layers=min(policy.resident_layers, most))

    def num_gpu_blocks(self, policy: ExecutionPolicy | None = None) -> int:
        """Of the GPU's tier under a policy; with all layers on the device, those that fit under the cap."""
        cpu_layers = policy.decode_cpu_layers if policy else 0
        return num_gpu_blocks(self.kv_shape, self._gpu_kv_cap_bytes, self._host_kv_bytes, cpu_layers)

    @property
    def memory(self) -> DeviceMemory | None:
        """None where layers cannot be streamed."""
        return self._placed.memory if self._placed else None

    @property
    def streamed_bytes(self) -> int:
        """Of weights that cross the link in each iteration."""
        return self._placed.memory.streamed_bytes(self.streamed_layers) if self._placed else 0

    @property
    def buffer_bytes(self) -> int:
        """On the device, that weights are streamed through."""
        return self._placed.memory.buffer_bytes(self.streamed_layers) if self._placed else 0

    @property
    def host_weight_bytes(self) -> int:
        """Of layers in host memory, to be streamed from there or computed by the CPU attention service."""
        return sum(self._placed.memory.layer_bytes[: -self.resident_layers or None]) if self._placed else 0

    def close_epoch(self) -> None:
        """Drops all sequences, the cache and the host tier."""
        if self._epoch is not None and self._epoch.host is not None:
            self._epoch.host.close()
        self._epoch = None

    def close(self) -> None:
        """Ends the epoch, the streaming of weights and the compiling of grammars."""
        self.close_epoch()
        if self._placed is not None:
            self._placed.close()
        if self.grammars is not None:
            self.grammars.close()

    def open_epoch(
        self, number: int, limits: Limits, host: HostTier | None, policy: ExecutionPolicy | None = None
    ) -> None:
        """Starts afresh, with `host` attached where there is one; where the policy has CPU layers there is.

        Without a policy as many layers as fit are resident, the others streamed. Raises DoesNotFitError for one that
        asks for more, LayerFileError and CheckpointError where weights cannot be had; where iterations are captured,
        PlaneError when the host tier is lost meanwhile. `host` is closed where it raises anything.
        """
        self.close_epoch()  # Both caches at once would exceed the cap.
        try:
            self._epoch = self._make_epoch(number, limits, host, policy)
            self.last_epoch = number
            self._epoch.capture()
        except BaseException:
            if self._epoch is None and host is not None:
                host.close()
            self.close_epoch()
            raise
        self._last_end_ns = time.perf_counter_ns()

    def _make_epoch(self, number: int, limits: Limits, host: HostTier | None, policy: ExecutionPolicy | None) -> Epoch:
        self._place(policy)
        self._check_limits(limits)
        policy = policy or ExecutionPolicy(self.resident_layers)
        cpu_layers = policy.decode_cpu_layers
        assert host is not None or cpu_layers == 0
        shape, num_blocks = self.kv_shape.above(cpu_layers), self.num_gpu_blocks(policy)
        graphs = self._graphs_for(policy)
        cache = GpuKvCache(shape, num_blocks, self.decoder.device, cpu_layers, has_scratch=graphs is not None)
        return Epoch(number, limits, self.decoder, cache, host, self._link, policy, self.grammars, graphs)

    def _graphs_for(self, policy: ExecutionPolicy) -> GraphOptions | None:
        """Where any iteration under this policy can be captured."""
        why = why_eager(self.decoder, policy)
        if why is None or self._graphs is None:
            return self._graphs
        logger.info("iterations are eager: %s", why)
        return None

    def _place(self, policy: ExecutionPolicy | None) -> None:
        num_layers = self.decoder.spec.num_layers
        if self._placed is None:
            on_cpu = min(policy.prefill_cpu_layers, policy.decode_cpu_layers) if policy else 0
            if policy is not None and policy.resident_layers + on_cpu < num_layers:
                raise DoesNotFitError("this executor keeps all layers on its device")
            return
        memory = self._placed.memory
        resident = memory.most_resident() if policy is None else policy.resident_layers
        first = min(policy.prefill_cpu_layers, policy.decode_cpu_layers) if policy else 0
        memory.check(resident, first)
        self._placed.place(range(first, num_layers - resident), resident)
        self._note_placement(resident, first)
        if self.streamed_layers:
            logger.info(
                "%d of %d layers lie on the device, %d are streamed, %d bytes in each iteration",
                resident,
                num_layers,
                len(self.streamed_layers),
                self.streamed_bytes,
            )

    def _check_limits(self, limits: Limits) -> None:
        """The planner may have been given more than this service was. Raises DoesNotFitError where that is too much."""
        if self._placed is None or self._sized_for is None:
            return
        sized, num_bytes = self._sized_for
        if all(getattr(limits, name) <= getattr(sized, name) for name in Limits.__dataclass_fields__):
            return
        needed = max(num_bytes(limits), self._placed.memory.activation_bytes)
        replace(self._placed.memory, activation_bytes=needed).check(self.resident_layers, self.streamed_layers.start)

    def _note_placement(self, resident: int, first_streamed: int) -> None:
        assert self._placed is not None
        self.resident_layers = resident
        self.streamed_layers = range(first_streamed, self.decoder.spec.num_layers - resident)
        self.weight_bytes = self._placed.memory.weight_bytes(resident)

    def profile(self) -> Tables:
        """Of an epoch that has run no plan. Raises PlaneError when the host tier is lost."""
        assert self._epoch is not None
        assert self._epoch.last_iteration == 0
        profiler = self._epoch.profiler()
        facts = {**profiler.facts(), "resident_layers": self.resident_layers}
        tables = self._table_cache.load(facts) if self._table_cache else None
        if tables is None:
            start_s = time.perf_counter()
            with self.decoder.measuring():
                tables = profiler.measure()
            logger.info("operations measured in %.1f s", time.perf_counter() - start_s)
            if self._table_cache:
                self._table_cache.store(facts, tables)
        self.link_bytes_per_s = tables.link_bytes_per_s
        self._last_end_ns = time.perf_counter_ns()
        return tables

    @torch.inference_mode()
    def run(
        self, plan: IterationPlan, received_ns: int | None = None, begun: Callable[[], None] = nobody
    ) -> IterationResult:
        """Never raises for what a plan, the CPU attention service or the device can do wrong: the result says it.

        `received_ns`: when the plan was there, by time.perf_counter_ns; None: now. From then on, or from the end of the
        iteration before, time counts as the iteration's: handing over is part of what a token takes. `begun` is told
        when the layers are about to run.
        """
        start_ns = max(received_ns or time.perf_counter_ns(), self._last_end_ns)
        epoch = self._epoch
        if epoch is None or plan.epoch != epoch.number:
            return _failure(plan.epoch, plan.iteration, ExecutionError.STALE, f"epoch {plan.epoch} is not open")
        if plan.trace:
            self._recorder.begin(start_ns)
        try:
            result = epoch.run(plan, self._recorder if plan.trace else NO_RECORDER, begun)
        except InvalidPlanError as error:
            return self.fail(plan.epoch, plan.iteration, ExecutionError.INVALID_PLAN, str(error))
        except PlaneError as error:
            return self.fail(plan.epoch, plan.iteration, ExecutionError.CPU_ATTENTION_LOST, str(error))
        except Exception as error:
            logger.exception("iteration %d failed", plan.iteration)
            return self.fail(plan.epoch, plan.iteration, ExecutionError.DEVICE, f"{type(error).__name__}: {error}")
        if plan.trace:
            self._recorder.mark(TraceKind.BOOKKEEPING)
        end_ns = time.perf_counter_ns()
        idle_ns, self._last_end_ns = start_ns - self._last_end_ns, end_ns
        return replace(
            result,
            timings=replace(result.timings, total_ns=end_ns - start_ns, idle_ns=idle_ns, start_ns=start_ns),
            trace=self._trace(plan, start_ns, end_ns) if plan.trace else None,
        )

    def _trace(self, plan: IterationPlan, start_ns: int, end_ns: int) -> IterationTrace:
        copied = self._placed.copied_since(start_ns) if self._placed else []
        return self._recorder.trace(plan, end_ns, copied)

    def fail(self, epoch: int, iteration: int, kind: ExecutionError, message: str) -> IterationResult:
        """Ends the epoch; closing the plane also ends what the CPU attention service still waits for."""
        if self._epoch is None or self._epoch.number != epoch:
            return _failure(epoch, iteration, ExecutionError.STALE, f"epoch {epoch} is not open")
        logger.error("epoch %d ends at iteration %d: %s: %s", epoch, iteration, kind.value, message)
        self.close_epoch()
        return _failure(epoch, iteration, kind, message)

    def status(self) -> Status:
        """From any thread; values may be an iteration apart."""
        epoch = self._epoch
        if epoch is None:
            resident, streamed_bytes = self.resident_layers, self.streamed_bytes
            return Status(self.last_epoch, 0, 0, 0, 0, self.weight_bytes, 0, False, resident, streamed_bytes)
        return Status(
            epoch=epoch.number,
            last_iteration=epoch.last_iteration,
            num_sequences=len(epoch.table.slot_of),
            gpu_blocks_used=epoch.table.owned[Tier.GPU].num_used,
            host_blocks_used=epoch.table.owned[Tier.HOST].num_used,
            weight_bytes=self.weight_bytes,
            gpu_kv_bytes=epoch.cache.num_bytes,
            cpu_attention_attached=epoch.host is not None and epoch.host.is_alive,
            resident_layers=self.resident_layers,
            streamed_bytes=self.streamed_bytes,
        )


def _failure(epoch: int, iteration: int, kind: ExecutionError, message: str) -> IterationResult:
    return IterationResult(epoch, iteration, error=kind, error_message=message)
