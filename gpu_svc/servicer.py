"""ExecutorService: takes plans off the wire, has them run in order on the executor's thread, sends results up."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor as ThreadExecutor
from typing import Any, TypeVar

import grpc

from gpu_svc import iteration_span
from gpu_svc.cpu_attention_client import attach_host_tier, region_shape
from gpu_svc.device_loss import end_process, is_lost
from gpu_svc.device_memory import DoesNotFitError
from gpu_svc.executor import Executor
from gpu_svc.grammars import GrammarError
from gpu_svc.host_tier import HostTier
from gpu_svc.limits import Limits
from gpu_svc.plan_runner import PlanRunner
from gpu_svc.wire import (
    memory_to_pb,
    policy_from_pb,
    policy_to_pb,
    result_to_pb,
    status_to_pb,
    tables_to_pb,
)
from neoflex.v1 import executor_pb2 as pb
from neoflex.v1 import executor_pb2_grpc
from svc_common.decoder.dtypes import dtype_name
from svc_common.errors import FieldViolation, failed_precondition, invalid_argument, invalid_arguments, unavailable
from svc_common.memory import size_text, usable_memory_bytes
from svc_common.plan import ExecutionError, IterationPlan
from svc_common.plan_text import plan_text
from svc_common.policy import ExecutionPolicy
from svc_common.security.tls import TlsFiles
from svc_common.telemetry.noted_spans import NoteSpan, nobody
from svc_common.tensor_plane import PlaneError

# One runs and one waits; a planner that sends more is held back by the stream.
_MAX_PENDING_PLANS = 4
_LOADING_RETRY_S = 1.0

logger = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Thin: the executor decides nothing and this decides less."""

    def __init__(
        self,
        executor: Executor | None,
        thread: ThreadExecutor,
        cpu_attention_addresses: Sequence[str],
        tls: TlsFiles | None = None,
        note_span: NoteSpan = nobody,
    ) -> None:
        """`thread` has one worker, the only one to touch `executor`. Addresses: of all CPU attention services, and
        `tls` to call them with.

        Without an executor all calls are answered UNAVAILABLE until `take` brings one.
        """
        self._note_span = note_span
        self._taken = executor
        self._thread = thread
        self._cpu_attention_addresses = tuple(cpu_attention_addresses)
        self._tls = tls
        self._opening = asyncio.Lock()
        self._is_stopping = False
        self._runners: set[PlanRunner] = set()
        """One for each stream of plans that a planner has open."""
        self._free = asyncio.Event()
        """Set while no planner has a stream of plans open."""
        self._free.set()

    @property
    def loaded(self) -> Executor | None:
        """None until the model is."""
        return self._taken

    def take(self, executor: Executor) -> None:
        """The model is loaded."""
        self._taken = executor

    @property
    def _executor(self) -> Executor:
        """Raises ServiceError while the model is being loaded."""
        if self._taken is None:
            raise unavailable("LOADING", "the model is being loaded", _LOADING_RETRY_S)
        return self._taken

    @property
    def _running(self) -> tuple[IterationPlan, float] | None:
        """The plan that runs and since when, by time.monotonic()."""
        # The watchdog asks from a thread of its own, while streams begin and end: a set may not change meanwhile.
        return next((running for runner in tuple(self._runners) if (running := runner.running)), None)

    @property
    def running_s(self) -> float:
        """For how long an iteration has been running; 0 where none is."""
        running = self._running
        return time.monotonic() - running[1] if running else 0.0

    @property
    def is_ready(self) -> bool:
        """Whether a planner may come."""
        return self._taken is not None and not self._is_stopping

    def stall(self, stall_s: float) -> str | None:
        """What does not move though it should; an epoch that is being opened may take minutes."""
        running, running_s = self._running, self.running_s
        return (
            f"iteration {running[0].iteration} runs for {running_s:.1f} s" if running and running_s > stall_s else None
        )

    def report(self) -> str:
        """What it does and holds, for its watchdog."""
        if self._taken is None:
            return "the model is being loaded"
        running = self._running
        runs = f"runs for {self.running_s:.1f} s: {plan_text(running[0])}" if running else "no iteration runs"
        return f"{runs}\n{self._taken.status()}\n{len(self._runners)} streams of plans; stopping {self._is_stopping}"

    def begin_stop(self) -> None:
        """From here on the planner is told that it should let go."""
        self._is_stopping = True

    async def released(self, timeout_s: float) -> None:
        """Returns once no planner has a stream of plans open, or when time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._free.wait()

    async def OpenEpoch(self, request: pb.OpenEpochRequest, context: Context) -> pb.OpenEpochResponse:
        _check_open_epoch(request)
        policy = self._policy(request)
        async with self._opening:
            if request.epoch <= self._executor.last_epoch:
                raise failed_precondition(
                    "EPOCH_NOT_NEWER", f"epoch {request.epoch} does not follow {self._executor.last_epoch}"
                )
            try:
                return await self._open_epoch(request, policy)
            except DoesNotFitError as error:
                raise failed_precondition("POLICY_DOES_NOT_FIT", str(error)) from error
            except Exception as error:  # No memory left, say, or weights that are no numbers: the planner is to say it.
                logger.exception("epoch %d cannot be opened", request.epoch)
                await self._in_thread(self._executor.close_epoch)
                await self._end_if_lost(str(error))
                raise failed_precondition("EPOCH_FAILED", f"{type(error).__name__}: {error}") from error

    async def _open_epoch(self, request: pb.OpenEpochRequest, policy: ExecutionPolicy) -> pb.OpenEpochResponse:
        executor = self._executor
        # The old pool is unmapped before a new one is made.
        await self._in_thread(executor.close_epoch)
        limits = Limits(request.max_sequences, request.max_batch_tokens, request.max_sequence_tokens)
        host, errors = await self._attach(request.epoch, limits, policy)
        if host is None and policy.decode_cpu_layers:
            policy = self._without_cpu_layers
        await self._in_thread(lambda: executor.open_epoch(request.epoch, limits, host, policy))
        tables = None
        if request.profile:
            try:
                tables = await self._in_thread(executor.profile)
            except PlaneError as lost:  # One of them; the others will be attached in another epoch.
                host, errors = None, tuple(error or f"lost while it was measured: {lost}" for error in errors)
                if policy.decode_cpu_layers:
                    policy = self._without_cpu_layers
                await self._in_thread(lambda: executor.open_epoch(request.epoch, limits, None, policy))
                tables = await self._in_thread(executor.profile)
        shape, upper = executor.kv_shape, executor.kv_shape.above(policy.decode_cpu_layers)
        response = pb.OpenEpochResponse(
            device=executor.decoder.device.type,
            compute_dtype=dtype_name(executor.decoder.weight_dtype),
            kv_dtype=dtype_name(shape.dtype),
            block_bytes=upper.block_bytes,
            gpu_blocks=executor.num_gpu_blocks(policy),
            host_pools=_host_pools(host, errors),
            tables=tables_to_pb(tables) if tables else None,
            host_kv_dtype=dtype_name(shape.host_dtype),
            host_block_bytes=shape.host_block_bytes,
            policy=policy_to_pb(policy),
            memory=self._memory(),
            resident_layers=executor.resident_layers,
            streamed_layers=len(executor.streamed_layers),
            streamed_bytes=executor.streamed_bytes,
            weight_bytes=executor.weight_bytes,
            buffer_bytes=executor.buffer_bytes,
            host_weight_bytes=executor.host_weight_bytes,
            model_digest=executor.decoder.spec.digest,
        )
        logger.info("%s", _memory_text(response))
        logger.info(
            "epoch %d: %d of %d layers on the CPU (%d of prompts), %d GPU blocks of %d bytes, "
            "%d host blocks of %d bytes%s",
            request.epoch,
            policy.decode_cpu_layers,
            shape.num_layers,
            policy.prefill_cpu_layers,
            response.gpu_blocks,
            upper.block_bytes,
            host.num_blocks if host else 0,
            shape.host_block_bytes,
            "".join(f"; no CPU attention: {error}" for error in errors if error),
        )
        return response

    def _policy(self, request: pb.OpenEpochRequest) -> ExecutionPolicy:
        """As asked for. Raises ServiceError where it can't be had."""
        executor = self._executor
        num_layers = executor.decoder.spec.num_layers
        if not request.HasField("policy"):
            return executor.fitting(ExecutionPolicy(num_layers))
        policy = policy_from_pb(request.policy)
        try:
            policy.check(num_layers)
        except ValueError as error:
            raise invalid_argument("policy", str(error)) from error
        prefill, decode = policy.prefill_cpu_layers, policy.decode_cpu_layers
        if prefill > decode:
            # K and V of prompts in those layers would have to travel to a pool that the CPU does not have.
            raise invalid_argument(
                "policy.prefill_cpu_layers", f"must be at most decode_cpu_layers, {decode}, is {prefill}"
            )
        num_services = len(self._cpu_attention_addresses)
        if decode > 0 and num_services != 1:
            where = "with several CPU attention services" if num_services else "where cpu_attn.kv_bytes is 0"
            raise invalid_argument("policy.decode_cpu_layers", f"must be 0 {where}, is {decode}")
        return executor.fitting(policy) if request.fewer_resident_layers else policy

    @property
    def _without_cpu_layers(self) -> ExecutionPolicy:
        """Where there is nobody to compute any."""
        return self._executor.fitting(ExecutionPolicy(self._executor.decoder.spec.num_layers))

    async def _attach(
        self, epoch: int, limits: Limits, policy: ExecutionPolicy
    ) -> tuple[HostTier | None, tuple[str, ...]]:
        """The host tier, if there is one, and why services are missing in it."""
        if not self._cpu_attention_addresses:
            return None, ()
        executor = self._executor
        shape = region_shape(executor.decoder, executor.kv_shape, limits, policy, executor.num_gpu_blocks(policy))
        return await attach_host_tier(self._cpu_attention_addresses, epoch, shape, executor.decoder, self._tls)

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ExecuteRequest], context: Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        runner = PlanRunner(self._executor, self._thread, _MAX_PENDING_PLANS)
        reader = asyncio.create_task(runner.take(request_iterator))
        self._runners.add(runner)
        self._free.clear()
        try:
            async for result in runner.results():
                if result.error is ExecutionError.DEVICE:
                    await self._end_if_lost(result.error_message)
                yield pb.ExecuteResponse(result=result_to_pb(result))
                if parent := runner.parent_of(result):
                    iteration_span.note(self._note_span, parent, result)
            await reader
        finally:
            reader.cancel()
            runner.close()
            self._runners.remove(runner)
            if not self._runners:
                self._free.set()

    async def CompileGrammar(self, request: pb.CompileGrammarRequest, context: Context) -> pb.CompileGrammarResponse:
        if self._executor.grammars is None or not self._executor.grammars.end_token_ids:
            return pb.CompileGrammarResponse(error="the model has no end token, by which an answer could end")
        try:
            await asyncio.wrap_future(self._executor.grammars.compile(request.grammar))
        except GrammarError as error:
            return pb.CompileGrammarResponse(error=str(error))
        return pb.CompileGrammarResponse()

    async def GetExecutorStatus(
        self, request: pb.GetExecutorStatusRequest, context: Context
    ) -> pb.GetExecutorStatusResponse:
        return status_to_pb(self._executor.status(), self._memory(), os.getpid(), self._is_stopping)

    def _memory(self) -> pb.DeviceMemory | None:
        memory = self._executor.memory
        return memory_to_pb(memory, self._executor.link_bytes_per_s) if memory else None

    async def _end_if_lost(self, reason: str) -> None:
        """Ends the process where no other epoch could be opened in it."""
        if await self._in_thread(lambda: is_lost(self._executor.decoder.device)):
            end_process(reason)

    def _in_thread(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work)


def _host_pools(host: HostTier | None, errors: Sequence[str]) -> list[pb.HostPool]:
    """One for each service that is configured."""
    if host is None:
        return [pb.HostPool(error=error) for error in errors]
    return [
        pb.HostPool(first_block=first, num_blocks=pool.num_blocks, num_threads=pool.num_threads)
        if pool
        else pb.HostPool(first_block=first, error=error)
        for pool, first, error in zip(host.pools, host.first_blocks, errors, strict=True)
    ]


def _memory_text(opened: pb.OpenEpochResponse) -> str:
    """What this process takes where, beside what it may take."""
    kv_bytes = opened.gpu_blocks * opened.block_bytes
    memory = opened.memory
    on_device = opened.weight_bytes + opened.buffer_bytes + memory.graph_bytes + memory.activation_bytes + kv_bytes
    in_host = opened.host_weight_bytes + (on_device if opened.device == "cpu" else 0)
    cap = f" of {size_text(memory.memory_bytes)}" if opened.HasField("memory") else ""
    return (
        f"on the device: weights {size_text(opened.weight_bytes)}, buffers for streamed weights "
        f"{size_text(opened.buffer_bytes)}, graphs {size_text(memory.graph_bytes)}, activations "
        f"{size_text(memory.activation_bytes)}, KV {size_text(kv_bytes)}, together {size_text(on_device)}{cap}; "
        f"weights in host memory {size_text(opened.host_weight_bytes)}; host memory of this process "
        f"{size_text(in_host)} of {size_text(usable_memory_bytes())}"
    )


def _check_open_epoch(request: pb.OpenEpochRequest) -> None:
    violations = tuple(
        FieldViolation(name, f"must be at least 1, is {value}")
        for name, value in (
            ("epoch", request.epoch),
            ("max_sequences", request.max_sequences),
            ("max_batch_tokens", request.max_batch_tokens),
            ("max_sequence_tokens", request.max_sequence_tokens),
        )
        if value < 1
    )
    if violations:
        raise invalid_arguments(violations)
