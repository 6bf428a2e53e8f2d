"""ExecutorService: takes plans off the wire, has them run in order on the executor's thread, sends results up."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor as ThreadExecutor
from functools import partial
from typing import Any, TypeVar

import grpc

from gpu_svc.cpu_attention_client import CpuAttentionUnavailableError, attach_host_tier, region_shape
from gpu_svc.device_memory import DoesNotFitError
from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostTier
from gpu_svc.limits import InvalidPlanError, Limits
from gpu_svc.wire import memory_to_pb, plan_from_pb, policy_from_pb, result_to_pb, status_to_pb, tables_to_pb
from neoflex.v1 import executor_pb2 as pb
from neoflex.v1 import executor_pb2_grpc
from svc_common.decoder.dtypes import dtype_name
from svc_common.errors import FieldViolation, failed_precondition, invalid_arguments
from svc_common.plan import ExecutionError, IterationResult
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import PlaneError

# One runs and one waits; a planner that sends more is held back by the stream.
_MAX_PENDING_PLANS = 4

logger = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Thin: the executor decides nothing and this decides less."""

    def __init__(self, executor: Executor, thread: ThreadExecutor, cpu_attention_address: str | None) -> None:
        """`thread` has one worker, the only one to touch `executor`. No address: no CPU attention configured."""
        self._executor = executor
        self._thread = thread
        self._cpu_attention_address = cpu_attention_address
        self._opening = asyncio.Lock()

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
                raise failed_precondition("EPOCH_FAILED", f"{type(error).__name__}: {error}") from error

    def _policy(self, request: pb.OpenEpochRequest) -> ExecutionPolicy | None:
        if not request.HasField("policy"):
            return None
        policy = policy_from_pb(request.policy)
        try:
            policy.check(self._executor.decoder.spec.num_layers)
        except ValueError as error:
            raise invalid_arguments((FieldViolation("policy", str(error)),)) from error
        if policy.prefill_cpu_layers or policy.decode_cpu_layers:
            text = "prefill_cpu_layers and decode_cpu_layers must be 0: the CPU computes no layers here"
            raise invalid_arguments((FieldViolation("policy", text),))
        return policy

    async def _open_epoch(self, request: pb.OpenEpochRequest, policy: ExecutionPolicy | None) -> pb.OpenEpochResponse:
        executor = self._executor
        # The old pool is unmapped before a new one is made.
        await self._in_thread(executor.close_epoch)
        limits = Limits(request.max_sequences, request.max_batch_tokens, request.max_sequence_tokens)
        host, cpu_attention_error = await self._attach(request.epoch, limits)
        await self._in_thread(lambda: executor.open_epoch(request.epoch, limits, host, policy))
        tables = None
        if request.profile:
            try:
                tables = await self._in_thread(executor.profile)
            except PlaneError as error:
                host, cpu_attention_error = None, f"lost while it was measured: {error}"
                await self._in_thread(lambda: executor.open_epoch(request.epoch, limits, None, policy))
                tables = await self._in_thread(executor.profile)
        shape = executor.kv_shape
        response = pb.OpenEpochResponse(
            device=executor.decoder.device.type,
            compute_dtype=dtype_name(executor.decoder.weight_dtype),
            kv_dtype=dtype_name(shape.dtype),
            block_bytes=shape.block_bytes,
            gpu_blocks=executor.num_gpu_blocks,
            host_blocks=host.num_blocks if host else 0,
            cpu_attention_error=cpu_attention_error,
            cpu_attention_threads=host.num_threads if host else 0,
            tables=tables_to_pb(tables) if tables else None,
            host_kv_dtype=dtype_name(shape.host_dtype),
            host_block_bytes=shape.host_block_bytes,
            memory=self._memory(),
            resident_layers=executor.resident_layers,
            streamed_layers=len(executor.streamed_layers),
            streamed_bytes=executor.streamed_bytes,
        )
        logger.info(
            "epoch %d: %d GPU blocks of %d bytes, %d host blocks of %d bytes%s",
            request.epoch,
            response.gpu_blocks,
            shape.block_bytes,
            response.host_blocks,
            shape.host_block_bytes,
            f"; no CPU attention: {cpu_attention_error}" if cpu_attention_error else "",
        )
        return response

    async def _attach(self, epoch: int, limits: Limits) -> tuple[HostTier | None, str]:
        """The host tier, or why there is none."""
        if self._cpu_attention_address is None:
            return None, ""
        shape = region_shape(self._executor.decoder, self._executor.kv_shape, limits)
        try:
            return await attach_host_tier(self._cpu_attention_address, epoch, shape), ""
        except CpuAttentionUnavailableError as error:
            return None, str(error)

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ExecuteRequest], context: Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        pending: asyncio.Queue[asyncio.Future[IterationResult] | None] = asyncio.Queue(_MAX_PENDING_PLANS)

        async def take_plans() -> None:
            try:
                async for request in request_iterator:
                    await pending.put(self._in_thread(partial(self._run, request.plan)))
            except Exception:
                await pending.put(None)
                raise
            await pending.put(None)

        reader = asyncio.create_task(take_plans())
        try:
            while (future := await pending.get()) is not None:
                yield pb.ExecuteResponse(result=result_to_pb(await future))
            await reader
        finally:
            reader.cancel()

    def _run(self, message: pb.IterationPlan) -> IterationResult:
        """On the executor's thread, so that a plan is read while none runs beside it and in its turn."""
        try:
            plan = plan_from_pb(message)
        except InvalidPlanError as error:
            return self._executor.fail(message.epoch, message.iteration, ExecutionError.INVALID_PLAN, str(error))
        return self._executor.run(plan)

    async def GetExecutorStatus(
        self, request: pb.GetExecutorStatusRequest, context: Context
    ) -> pb.GetExecutorStatusResponse:
        return status_to_pb(self._executor.status(), self._memory(), os.getpid())

    def _memory(self) -> pb.DeviceMemory | None:
        memory = self._executor.memory
        return memory_to_pb(memory, self._executor.link_bytes_per_s) if memory else None

    def _in_thread(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work)


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
