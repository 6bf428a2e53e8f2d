"""Keeps the executor busy: one plan runs and one waits, epoch after epoch, whatever becomes of the other services."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from dataclasses import replace
from enum import Enum

from planner_svc.core_keeper import CoreKeeper
from planner_svc.engine import Engine
from planner_svc.estimator import OperationTables, TableEstimator
from planner_svc.executor_client import (
    EpochLimits,
    ExecutorClient,
    ExecutorLostError,
    HostClient,
    HostStatus,
    Placement,
    PlanStream,
)
from planner_svc.policy_keeper import PolicyKeeper
from planner_svc.policy_tables import MakeEstimator, PolicyTables
from planner_svc.scheduler import Capacity, TokenEvent
from planner_svc.traces import Traces
from svc_common.errors import unavailable
from svc_common.plan import ExecutionError, IterationPlan, IterationResult
from svc_common.policy import ExecutionPolicy

PLANS_AHEAD = 2
"""One runs, one waits."""
_CONNECT_S = 10.0
_RETRY_S = 1.0
_PROBE_EVERY_S = 1.0
_MAX_ATTACH_DELAY_S = 60.0

logger = logging.getLogger(__name__)


class EpochEnd(Enum):
    """Why an epoch is over though the executor is well."""

    HOST_LOST = "the CPU attention service is lost"
    HOST_BACK = "the CPU attention service can be attached again"
    FAILED = "an iteration failed"
    POLICY = "layers are to run elsewhere"


class ExecutorLoop:
    """Owns the connections to gpu_svc and, to look at it and to size it, cpu_attn_svc."""

    def __init__(
        self,
        engine: Engine,
        executor: ExecutorClient,
        host: HostClient | None,
        limits: EpochLimits,
        block_tokens: int,
        make_estimator: MakeEstimator,
        cores: CoreKeeper,
        traces: Traces,
        policy: ExecutionPolicy | None = None,
        policies: PolicyKeeper | None = None,
    ) -> None:
        """`host` is None where no CPU attention service is configured.

        Without a policy layers run where the executor puts them, or, if not all fit there, where `policies` says.
        """
        self._engine = engine
        self._executor = executor
        self._host = host
        self._limits = limits
        self._block_tokens = block_tokens
        self._cores = cores
        self._traces = traces
        self._policy = policy
        self._policies = policies
        self._tables = PolicyTables(make_estimator)
        self._capacity: Capacity | None = None
        self._estimator: TableEstimator | None = None
        self._epoch = time.time_ns()  # Later than any epoch of a planner before this one.
        self._driving = False
        self._requested_end: EpochEnd | None = None
        self._attach_delay_s = _PROBE_EVERY_S
        self._next_attach_s = 0.0
        self.placement: Placement | None = None
        """Of the latest epoch; None before the first."""

    async def run(self) -> None:
        """Never returns; to be cancelled."""
        watcher = asyncio.create_task(self._watch_host(self._host)) if self._host else None
        try:
            while True:
                await self._serve_until_lost()
                await asyncio.sleep(_RETRY_S)
        finally:
            if watcher:
                watcher.cancel()

    async def _serve_until_lost(self) -> None:
        """From finding the executor to losing it."""
        try:
            await self._connect()
            await self._prepare(profile=True)
            await self._choose_first_policy()
            self._hand_over()
            while True:
                await self._next_epoch(await self._drive())
        except ExecutorLostError as error:
            logger.error("executor lost: %s", error)
            self._engine.close(unavailable("EXECUTOR_LOST", "the executor was lost; it is awaited", _RETRY_S))
        except Exception:
            logger.exception("the engine failed; all requests end and the executor is opened afresh")
            self._engine.abandon(unavailable("ENGINE_FAILED", "the engine failed and is restarting", _RETRY_S))

    async def _connect(self) -> None:
        """Waits for gpu_svc; before the first epoch for cpu_attn_svc too, so that start-up order does not matter."""
        if self._host and self.placement is None:
            await self._until_host_answers(self._host)
        while True:
            try:
                # Later than what another planner with a faster clock may have opened.
                self._epoch = max(self._epoch, await self._executor.last_epoch(_CONNECT_S))
                return
            except ExecutorLostError as error:
                logger.info("waiting for the executor: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _open(self, profile: bool) -> None:
        """Opens the next epoch and hands it to the engine. Raises ExecutorLostError."""
        await self._prepare(profile)
        self._hand_over()

    def _hand_over(self) -> None:
        assert self._capacity is not None
        assert self._estimator is not None
        self._cores.begin_epoch()
        self._engine.open(self._capacity, self._estimator, self._epoch)

    async def _prepare(self, profile: bool) -> None:
        """Opens the next epoch. Raises ExecutorLostError."""
        placement, tables = await self._open_epoch(profile or not self._tables.knows(self._policy))
        if tables is None and not self._tables.knows(placement.policy):
            # Not as it was asked for: the CPU attention service, and with it its layers, has gone since.
            placement, tables = await self._open_epoch(profile=True)
        self._note_attachment(placement)
        if placement.host_blocks == 0 and self._host and self.placement is None:
            raise ExecutorLostError(f"no CPU attention at the first start: {placement.cpu_attention_error}")
        if tables is not None:
            # What was asked for is known by that name only as long as it is what there is.
            has_all = placement.host_blocks > 0 or self._host is None or self._policy is None
            self._tables.add(tables, placement.policy, self._policy if has_all else placement.policy)
        self._estimator = self._tables.estimator(placement.policy)
        if self._estimator is None:
            raise ExecutorLostError("the executor measured no tables")
        if tables is not None:
            self._cores.measured(self._estimator, placement.cpu_attention_threads)
        self._estimator.stream(placement.streamed_layers, placement.streamed_bytes)
        self._capacity = Capacity(
            gpu_blocks=placement.gpu_blocks,
            host_blocks=placement.host_blocks,
            block_tokens=self._block_tokens,
            max_sequences=self._limits.max_sequences,
            max_batch_tokens=self._limits.max_batch_tokens,
            max_sequence_tokens=self._limits.max_sequence_tokens,
            block_bytes=placement.host_block_bytes,
            has_cpu_layers=placement.policy is not None and placement.policy.decode_cpu_layers > 0,
        )
        self.placement = placement
        if self._policies:
            self._policies.opened(placement, time.monotonic())
        logger.info(
            "epoch %d: %s, %s, KV %s, on the host %s, %d GPU blocks, %d host blocks of %d tokens, "
            "%d CPU attention threads%s%s",
            self._epoch,
            placement.device,
            placement.compute_dtype,
            placement.kv_dtype,
            placement.host_kv_dtype,
            placement.gpu_blocks,
            placement.host_blocks,
            self._block_tokens,
            placement.cpu_attention_threads,
            f"; {placement.cpu_attention_error}" if placement.cpu_attention_error else "",
            f"; {placement.streamed_layers} layers are streamed" if placement.streamed_layers else "",
        )

    async def _next_epoch(self, end: EpochEnd) -> None:
        """Carries the requests in hand over into a new epoch."""
        logger.warning("epoch %d ends: %s", self._epoch, end.value)
        if end is EpochEnd.FAILED:
            self._engine.fail_all(unavailable("EXECUTION_FAILED", "the executor failed at an iteration", _RETRY_S))
        if end is EpochEnd.HOST_LOST:
            self._lose_host()
        self._engine.suspend()
        # Tables measured without the host say nothing about attention there.
        tables = self._tables.tables(self._policy)
        await self._open(profile=end is EpochEnd.HOST_BACK and tables is not None and not tables.cpu_decode)

    async def _open_epoch(self, profile: bool) -> tuple[Placement, OperationTables | None]:
        self._epoch += 1
        return await self._executor.open_epoch(self._epoch, self._limits, profile, self._policy)

    async def _choose_first_policy(self) -> None:
        """Measures layers on the CPU where some don't fit on the device, and opens an epoch by the policy chosen."""
        assert self.placement is not None
        policy = self._policies.to_measure(self.placement) if self._policies else None
        if self._policies is None or policy is None:
            return
        before, self._policy = self._policy, policy
        await self._prepare(profile=True)
        tables = self._tables.tables(self.placement.policy)
        assert tables is not None
        chosen = await asyncio.to_thread(self._policies.measured, self.placement, tables)
        self._tables.of_both = self._policies.tables
        self._policy = chosen or before
        await self._prepare(profile=False)

    def change_policy(self, policy: ExecutionPolicy | None) -> None:
        """Layers run as `policy` says from a new epoch on, which begins at once.

        Requests in hand go on in it, computed again from prompt and tokens so far. No policy: the executor's own.
        """
        if policy == self._policy:
            return
        self._policy = policy
        if self._driving:
            self._request_end(EpochEnd.POLICY)

    def _lose_host(self) -> None:
        """Tells callers at once, before the executor has given up on the service and opened the next epoch."""
        assert self._capacity is not None
        assert self._estimator is not None
        assert self.placement is not None
        self.placement = replace(self.placement, host_blocks=0, cpu_attention_threads=0)
        self._capacity = replace(self._capacity, host_blocks=0)
        self._epoch += 1
        self._engine.open(self._capacity, self._estimator, self._epoch, lose_host=True)

    async def _drive(self) -> EpochEnd:
        """Feeds plans and takes results until the epoch is over. Raises ExecutorLostError."""
        stream = self._executor.execute()
        results: deque[IterationResult | Exception] = deque()
        reader = asyncio.create_task(self._read(stream, results))
        self._requested_end = None
        self._driving = True
        try:
            return await self._exchange(stream, results)
        finally:
            self._driving = False
            reader.cancel()
            stream.close()

    async def _exchange(self, stream: PlanStream, results: "deque[IterationResult | Exception]") -> EpochEnd:
        in_flight: deque[IterationPlan] = deque()
        self._engine.wake.set()
        while True:
            await self._engine.wake.wait()
            self._engine.wake.clear()
            tokens: list[TokenEvent] = []
            end = self._requested_end
            while results and end is None:
                result = results.popleft()
                if isinstance(result, Exception):
                    self._engine.deliver(tokens)
                    raise result
                if result.error is not None:
                    end = self._end_of(result)
                else:
                    plan = in_flight.popleft()
                    tokens += self._engine.apply(result)
                    self._cores.observe(result)
                    if result.trace is not None:
                        self._traces.publish(replace(result.trace, predicted_ns=round(plan.predicted_s * 1e9)))
            # Plan first: the executor must not wait while text is made of tokens.
            while end is None and len(in_flight) < PLANS_AHEAD and (next_plan := self._engine.plan()):
                self._cores.planned(next_plan, self._engine.num_on_host)
                await stream.send(replace(next_plan, trace=True) if self._traces.are_wanted else next_plan)
                in_flight.append(next_plan)
            self._engine.deliver(tokens)
            if end is not None:
                return end

    async def _read(self, stream: PlanStream, results: "deque[IterationResult | Exception]") -> None:
        """Puts what the executor sends, its loss included, where the loop finds it."""
        try:
            async for result in stream.results():
                results.append(result)
                self._engine.wake.set()
        except Exception as error:
            results.append(error)
            self._engine.wake.set()

    @staticmethod
    def _end_of(result: IterationResult) -> EpochEnd:
        assert result.error is not None
        logger.error("iteration %d failed: %s: %s", result.iteration, result.error.value, result.error_message)
        return EpochEnd.HOST_LOST if result.error is ExecutionError.CPU_ATTENTION_LOST else EpochEnd.FAILED

    # --- the CPU attention service

    async def _watch_host(self, host: HostClient) -> None:
        """Each second: has an attached service gone or restarted, has one that was missed come back?"""
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            epoch = self._epoch
            with contextlib.suppress(TimeoutError):
                status = await host.status()
                if self._driving and self._epoch == epoch:
                    self._compare(status)
                    if status and status.region_epoch == epoch:
                        await self._cores.adjust(host)
                        await self._consider_policy(epoch)

    async def _consider_policy(self, epoch: int) -> None:
        """With the service attached: without it there is one policy only. A search may take a second."""
        if self._policies is None:
            return
        policy = await asyncio.to_thread(self._policies.consider, self._engine.demand, time.monotonic())
        if policy is not None and self._epoch == epoch:
            self.change_policy(policy)

    def _compare(self, status: HostStatus | None) -> None:
        """`status` is None where nobody answers."""
        assert self._capacity is not None
        assert self.placement is not None
        if self._capacity.host_blocks > 0:
            if status is None or status.region_epoch != self._epoch:
                self._request_end(EpochEnd.HOST_LOST)
            else:
                self._cores.note(status)
                self.placement = replace(
                    self.placement,
                    cpu_attention_threads=status.num_threads,
                    cpu_attention_limits=self._cores.limits,
                )
        elif status is not None and time.monotonic() >= self._next_attach_s:
            self._request_end(EpochEnd.HOST_BACK)

    def _request_end(self, end: EpochEnd) -> None:
        self._requested_end = end
        self._engine.wake.set()

    def _note_attachment(self, placement: Placement) -> None:
        """Each failure to attach a service that answers doubles the time to the next try: a try stops all work."""
        if placement.host_blocks > 0:
            self._attach_delay_s = _PROBE_EVERY_S
        else:
            self._next_attach_s = time.monotonic() + self._attach_delay_s
            self._attach_delay_s = min(2 * self._attach_delay_s, _MAX_ATTACH_DELAY_S)

    @staticmethod
    async def _until_host_answers(host: HostClient) -> None:
        for attempt in itertools.count():
            with contextlib.suppress(TimeoutError):
                if await host.status() is not None:
                    return
            if attempt % 10 == 9:
                logger.info("waiting for the CPU attention service")
            await asyncio.sleep(_RETRY_S)
