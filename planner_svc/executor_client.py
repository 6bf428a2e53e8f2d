"""The planner's end of the inner services: epochs, plans and results with gpu_svc, a look at each cpu_attn_svc."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields, replace

import grpc
from google.protobuf import text_format
from google.protobuf.message import Message

from neoflex.v1 import cpu_attention_pb2, cpu_attention_pb2_grpc, executor_pb2, executor_pb2_grpc
from planner_svc import wire
from planner_svc.estimator import OperationTables
from svc_common.grpc_server import CHANNEL_OPTIONS
from svc_common.plan import IterationPlan, IterationResult
from svc_common.policy import ExecutionPolicy
from svc_common.security.tls import TlsFiles
from svc_common.service_link import ServiceLink

_OPTIONS = [
    *CHANNEL_OPTIONS,
    # A service that restarts is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_PROFILE_S = 900.0
"""Profiling a large model on a slow device takes minutes."""
_OPEN_S = 180.0
"""A host pool of hundreds of GiB takes minutes to reserve."""
_LOAD_LAYERS_S = 1200.0
"""Layers that change places come from a disk, tens of GB of them."""
_PROBE_S = 1.0
_COMPILE_S = 180.0
"""The first grammar waits until the tokenizer is read, and one that was not kept takes a minute to convert."""
_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
"""What a call ends with where nobody answers; anything else was said by gpu_svc."""


class ExecutorLostError(Exception):
    """gpu_svc does not answer, or answers what it should not. Its sequences are gone."""


class EpochRefusedError(ExecutorLostError):
    """gpu_svc is there and can't do what this planner needs; the text says why. The next try may end the same way."""


class ThreadsUnchangedError(Exception):
    """cpu_attn_svc does not say that it computes with the threads it was told."""


@dataclass(frozen=True, slots=True)
class EpochLimits:
    """What the planner promises to keep within."""

    max_sequences: int
    max_batch_tokens: int
    max_sequence_tokens: int


@dataclass(frozen=True, slots=True)
class HostPool:
    """The pool of one CPU attention service."""

    num_blocks: int
    """0 where the service is not attached."""
    num_threads: int
    error: str
    """Why it is not attached."""
    thread_limits: tuple[int, int] | None = None
    """Fewest and most threads that the planner sets; None where it leaves their number alone."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of the executor's device, and what weights take there."""

    memory_bytes: int
    layer_bytes: int
    """Of the largest layer."""
    other_bytes: int
    """In no layer."""
    kv_bytes: int = 0
    """At most."""
    activation_bytes: int = 0
    graph_bytes: int = 0
    spare_bytes: int = 0
    """Kept free."""

    @property
    def placed_bytes(self) -> int:
        """For weights, buffers and KV."""
        return self.memory_bytes - self.activation_bytes - self.graph_bytes - self.spare_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """What an epoch has to work with."""

    device: str
    compute_dtype: str
    kv_dtype: str
    """On the GPU."""
    block_bytes: int
    """On the GPU."""
    host_kv_dtype: str
    host_block_bytes: int
    gpu_blocks: int
    pools: tuple[HostPool, ...]
    """One for each CPU attention service that is configured, in that order."""
    memory: DeviceMemory | None = None
    """None where layers cannot be streamed."""
    policy: ExecutionPolicy | None = None
    """That the executor follows, which lacks the CPU layers asked for where no CPU attention service is attached."""
    resident_layers: int = 0
    """Whose weights stay on the device."""
    streamed_layers: int = 0
    """Whose weights cross the link in each iteration."""
    streamed_bytes: int = 0
    """Of weights, in each iteration."""
    weight_bytes: int = 0
    """On the device."""
    buffer_bytes: int = 0
    """On the device, that weights are streamed through."""
    host_weight_bytes: int = 0
    """Of weights in host memory."""
    model_digest: str = ""
    """Of the model that the executor has read, see ModelSpec.digest."""

    @property
    def host_blocks(self) -> int:
        """Of all pools."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def gpu_kv_bytes(self) -> int:
        return self.gpu_blocks * self.block_bytes

    @property
    def host_kv_bytes(self) -> int:
        """Of all pools."""
        return self.host_blocks * self.host_block_bytes

    @property
    def errors(self) -> str:
        """Why services are not attached."""
        return "; ".join(pool.error for pool in self.pools if pool.error)

    def with_pool(self, number: int, **changes: object) -> "Placement":
        """The same but for one pool."""
        pools = [
            replace(pool, **changes) if index == number else pool  # type: ignore[arg-type]  # fields of any type
            for index, pool in enumerate(self.pools)
        ]
        return replace(self, pools=tuple(pools))


class ExecutorClient:
    """Talks to gpu_svc. All methods raise ExecutorLostError when it does not answer."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        """Raises ConfigError where the certificate is of no use for calls."""
        self._link = ServiceLink(address, executor_pb2_grpc.ExecutorServiceStub, tls, _OPTIONS)
        self._num_compiling = 0
        self._compiling_failed = False

    @property
    def was_compiling(self) -> bool:
        """Whether a grammar is being made ready, or that has failed since the last epoch was opened."""
        return self._num_compiling > 0 or self._compiling_failed

    async def last_epoch(self, timeout_s: float) -> int:
        """The latest epoch that gpu_svc has seen; waits up to `timeout_s` for the service, which must not be ending."""
        try:
            status = await self._status(timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error
        if status.stopping:
            raise ExecutorLostError("it has been told to stop")
        return int(status.epoch)

    async def is_stopping(self) -> bool:
        """Whether it has been told to stop; False where it does not answer."""
        try:
            return bool((await self._status(_PROBE_S)).stopping)
        except grpc.aio.AioRpcError:
            return False

    async def describe(self) -> str:
        """What it says of itself, in one line."""
        try:
            return _one_line(await self._status(_PROBE_S))
        except grpc.aio.AioRpcError as error:
            return f"no answer: {error.code().name}"

    async def _status(self, timeout_s: float, wait_for_ready: bool = False) -> executor_pb2.GetExecutorStatusResponse:
        status: executor_pb2.GetExecutorStatusResponse = await self._link.stub.GetExecutorStatus(
            executor_pb2.GetExecutorStatusRequest(), timeout=timeout_s, wait_for_ready=wait_for_ready
        )
        return status

    async def open_epoch(
        self, epoch: int, limits: EpochLimits, profile: bool, policy: ExecutionPolicy | None
    ) -> tuple[Placement, OperationTables | None]:
        """Starts an epoch; with measured tables where `profile` is set. Without a policy the executor has its own."""
        request = executor_pb2.OpenEpochRequest(
            epoch=epoch,
            max_sequences=limits.max_sequences,
            max_batch_tokens=limits.max_batch_tokens,
            max_sequence_tokens=limits.max_sequence_tokens,
            profile=profile,
            policy=wire.policy_to_message(policy) if policy else None,
            fewer_resident_layers=True,
        )
        timeout_s = (_PROFILE_S if profile else _OPEN_S) + (_LOAD_LAYERS_S if policy else 0.0)
        try:
            opened = await self._link.stub.OpenEpoch(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in _UNREACHABLE:
                raise _lost(error) from error
            raise EpochRefusedError(error.details() or error.code().name) from error
        self._compiling_failed = False
        placement = Placement(
            device=opened.device,
            compute_dtype=opened.compute_dtype,
            kv_dtype=opened.kv_dtype,
            block_bytes=opened.block_bytes,
            host_kv_dtype=opened.host_kv_dtype,
            host_block_bytes=opened.host_block_bytes,
            gpu_blocks=opened.gpu_blocks,
            pools=tuple(HostPool(pool.num_blocks, pool.num_threads, pool.error) for pool in opened.host_pools),
            memory=_memory(opened),
            policy=wire.policy_from_message(opened.policy) if opened.HasField("policy") else None,
            resident_layers=opened.resident_layers,
            streamed_layers=opened.streamed_layers,
            streamed_bytes=opened.streamed_bytes,
            weight_bytes=opened.weight_bytes,
            buffer_bytes=opened.buffer_bytes,
            host_weight_bytes=opened.host_weight_bytes,
            model_digest=opened.model_digest,
        )
        return placement, wire.tables_from_message(opened.tables) if opened.HasField("tables") else None

    async def compile_grammar(self, grammar: str) -> str:
        """Has gpu_svc make a grammar ready; returns why it can't be kept to, or nothing."""
        request = executor_pb2.CompileGrammarRequest(grammar=grammar)
        self._num_compiling += 1
        try:
            return str((await self._link.stub.CompileGrammar(request, timeout=_COMPILE_S)).error)
        except grpc.aio.AioRpcError as error:
            self._compiling_failed = True
            raise _lost(error) from error
        finally:
            self._num_compiling -= 1

    def execute(self) -> "PlanStream":
        """A stream for the plans of one epoch."""
        return PlanStream(self._link.stub.Execute())

    async def close(self) -> None:
        await self._link.close()


def _memory(opened: executor_pb2.OpenEpochResponse) -> DeviceMemory | None:
    found = opened.memory
    if not opened.HasField("memory"):
        return None
    return DeviceMemory(**{item.name: getattr(found, item.name) for item in fields(DeviceMemory)})


class PlanStream:
    """Plans down, results up, in order."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[executor_pb2.ExecuteRequest, executor_pb2.ExecuteResponse]"):
        self._call = call
        self._is_connected = False

    async def send(self, plan: IterationPlan) -> None:
        """Raises ExecutorLostError."""
        try:
            if not self._is_connected:
                await self._connect()
            await self._call.write(executor_pb2.ExecuteRequest(plan=wire.plan_to_message(plan)))
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error
        except asyncio.InvalidStateError as error:  # The call ended, and who reads it has not heard yet.
            raise ExecutorLostError("the stream of plans has ended") from error

    async def _connect(self) -> None:
        """gRPC's own wait for a call's connection, and its first write, never end where the call fails before it."""
        connected = asyncio.ensure_future(self._call.wait_for_connection())
        ended = asyncio.ensure_future(self._call.code())
        try:
            await asyncio.wait({connected, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                raise ExecutorLostError(f"{(await ended).name}: {await self._call.details()}")
            await connected
            self._is_connected = True
        finally:
            connected.cancel()
            ended.cancel()

    async def results(self) -> AsyncIterator[IterationResult]:
        """Never ends but by ExecutorLostError."""
        try:
            async for response in self._call:
                yield wire.result_from_message(response.result)
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error
        except ValueError as error:
            raise ExecutorLostError(f"a result contradicts itself: {error}") from error
        raise ExecutorLostError("the stream of results has ended")

    def close(self) -> None:
        self._call.cancel()


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What the planner wants to know of cpu_attn_svc."""

    region_epoch: int
    """0 where it has no region."""
    num_threads: int
    max_threads: int
    """That it allows."""
    is_stopping: bool = False
    """Told to: it ends once it is let go."""


class HostClient:
    """Looks at one cpu_attn_svc: is it there, whose region does it hold; and sizes it. gpu_svc alone works with it."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        """Raises ConfigError where the certificate is of no use for calls."""
        self.address = address
        self._link = ServiceLink(address, cpu_attention_pb2_grpc.CpuAttentionServiceStub, tls, _OPTIONS)

    async def status(self) -> HostStatus | None:
        """What it says of itself; None where nobody listens.

        Raises TimeoutError where it is too slow to answer: busy, perhaps, and so not known to be lost.
        """
        try:
            status = await self._status()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            return None
        return HostStatus(status.epoch, status.num_threads, status.max_threads, status.stopping)

    async def describe(self) -> str:
        """What it says of itself, in one line."""
        try:
            return _one_line(await self._status())
        except grpc.aio.AioRpcError as error:
            return f"no answer: {error.code().name}"

    async def _status(self) -> cpu_attention_pb2.GetCpuAttentionStatusResponse:
        status: cpu_attention_pb2.GetCpuAttentionStatusResponse = await self._link.stub.GetCpuAttentionStatus(
            cpu_attention_pb2.GetCpuAttentionStatusRequest(), timeout=_PROBE_S
        )
        return status

    async def set_threads(self, num_threads: int) -> None:
        """From the next iteration on. Raises ThreadsUnchangedError where that is not certain."""
        try:
            await self._link.stub.SetThreads(
                cpu_attention_pb2.SetThreadsRequest(num_threads=num_threads), timeout=_PROBE_S
            )
        except grpc.aio.AioRpcError as error:
            raise ThreadsUnchangedError(f"{error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        await self._link.close()


def _one_line(message: Message) -> str:
    """Fields that are not 0."""
    return text_format.MessageToString(message, as_one_line=True)


def _lost(error: grpc.aio.AioRpcError) -> ExecutorLostError:
    return ExecutorLostError(f"{error.code().name}: {error.details()}")
