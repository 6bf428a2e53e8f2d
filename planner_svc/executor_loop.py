"""Keeps the executor busy: one plan runs and one waits, epoch after epoch, whatever becomes of the other services."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from planner_svc.engine import Engine
from planner_svc.estimator import OperationTables, TableEstimator
from planner_svc.executor_client import (
    EpochLimits,
    ExecutorClient,
    ExecutorLostError,
    HostStatus,
    Placement,
    PlanStream,
)
from planner_svc.host_watch import PROBE_EVERY_S, HostWatch
from planner_svc.iteration_meters import IterationMeters
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

logger = logging.getLogger(__name__)


class EpochEnd(Enum):
    """Why an epoch is over though the executor is well."""

    HOST_LOST = "a CPU attention service is lost"
    HOST_BACK = "a CPU attention service can be attached again"
    FAILED = "an iteration failed"
    POLICY = "layers are to run elsewhere"


class ExecutorLoop:
    """Owns the connection to gpu_svc, and has an eye on each cpu_attn_svc."""

    def __init__(
        self,
        engine: Engine,
        executor: ExecutorClient,
        watches: Sequence[HostWatch],
        limits: EpochLimits,
        block_tokens: int,
        make_estimator: MakeEstimator,
        traces: Traces,
        meters: IterationMeters,
        policy: ExecutionPolicy | None = None,
        policies: PolicyKeeper | None = None,
    ) -> None:
        """`watches`: one for each CPU attention service that is configured, by its pool.

        Without a policy layers run where the executor puts them, or, if not all fit there, where `policies` says.
        """
        self._engine = engine
        self._executor = executor
        self._watches = tuple(watches)
        self._limits = limits
        self._block_tokens = block_tokens
        self._traces = traces
        self._meters = meters
        self._policy = policy
        self._policies = policies
        self._tables = PolicyTables(make_estimator)
        self._capacity: Capacity | None = None
        self._estimator: TableEstimator | None = None
        self._epoch = time.time_ns()  # Later than any epoch of a planner before this one.
        self._driving = False
        self._requested_end: EpochEnd | None = None
        self._lost_pools: set[int] = set()
        """By what their services say or do not say, in this epoch."""
        self.placement: Placement | None = None
        """Of the latest epoch; None before the first."""

    async def run(self) -> None:
        """Never returns; to be cancelled."""
        watchers = [asyncio.create_task(self._watch_host(pool)) for pool in range(len(self._watches))]
        try:
            while True:
                await self._serve_until_lost()
                await asyncio.sleep(_RETRY_S)
        finally:
            for watcher in watchers:
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
            self._meters.epoch_ended("executor_lost")
            self._engine.close(unavailable("EXECUTOR_LOST", "the executor was lost; it is awaited", _RETRY_S))
        except Exception:
            logger.exception("the engine failed; all requests end and the executor is opened afresh")
            self._meters.epoch_ended("engine_failed")
            self._engine.abandon(unavailable("ENGINE_FAILED", "the engine failed and is restarting", _RETRY_S))

    async def _connect(self) -> None:
        """Waits for gpu_svc; before the first epoch for all others too, so that start-up order does not matter."""
        if self.placement is None:
            for watch in self._watches:
                await watch.until_it_answers()
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
        for watch in self._watches:
            watch.cores.begin_epoch()
        self._engine.open(self._capacity, self._estimator, self._epoch)

    async def _prepare(self, profile: bool) -> None:
        """Opens the next epoch. Raises ExecutorLostError."""
        placement, tables = await self._open_epoch(profile or not self._tables.knows(self._policy))
        if tables is None and not self._tables.knows(placement.policy):
            # Not as it was asked for: the CPU attention service, and with it its layers, has gone since.
            placement, tables = await self._open_epoch(profile=True)
        self._note_attachments(placement)
        if tables is not None:
            # What was asked for is known by that name only as long as it is what there is.
            has_all = placement.host_blocks > 0 or not self._watches or self._policy is None
            self._tables.add(tables, placement.policy, self._policy if has_all else placement.policy)
        self._estimator = self._tables.estimator(placement.policy)
        if self._estimator is None:
            raise ExecutorLostError("the executor measured no tables")
        if tables is not None:
            for watch, pool in zip(self._watches, placement.pools, strict=True):
                watch.cores.measured(self._estimator, pool.num_threads)
        self._estimator.stream(placement.streamed_layers, placement.streamed_bytes)
        self._capacity = Capacity(
            gpu_blocks=placement.gpu_blocks,
            host_pools=tuple(pool.num_blocks for pool in placement.pools),
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
            "epoch %d: %s, %s, KV %s, on the host %s, %d GPU blocks, %s host blocks of %d tokens, "
            "%s CPU attention threads%s%s",
            self._epoch,
            placement.device,
            placement.compute_dtype,
            placement.kv_dtype,
            placement.host_kv_dtype,
            placement.gpu_blocks,
            " + ".join(str(pool.num_blocks) for pool in placement.pools) or 0,
            self._block_tokens,
            " + ".join(str(pool.num_threads) for pool in placement.pools) or 0,
            f"; {placement.errors}" if placement.errors else "",
            f"; {placement.streamed_layers} layers are streamed" if placement.streamed_layers else "",
        )

    def _note_attachments(self, placement: Placement) -> None:
        """Raises ExecutorLostError where the executor is not the one that is configured, or is not yet complete."""
        if len(placement.pools) != len(self._watches):
            raise ExecutorLostError(f"it has {len(placement.pools)} host pools, configured are {len(self._watches)}")
        for watch, pool in zip(self._watches, placement.pools, strict=True):
            watch.note_attachment(pool.num_blocks > 0)
        if self.placement is None and not all(pool.num_blocks for pool in placement.pools):
            raise ExecutorLostError(f"not all CPU attention at the first start: {placement.errors}")

    async def _next_epoch(self, end: EpochEnd) -> None:
        """Carries the requests in hand over into a new epoch."""
        logger.warning("epoch %d ends: %s", self._epoch, end.value)
        self._meters.epoch_ended(end.name.lower())
        if end is EpochEnd.FAILED:
            self._engine.fail_all(unavailable("EXECUTION_FAILED", "the executor failed at an iteration", _RETRY_S))
        if end is EpochEnd.HOST_LOST:
            await self._lose_hosts()
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

    async def _lose_hosts(self) -> None:
        """Tells callers who fit nowhere else, before the executor has given up on a service and opened the next epoch.

        Where the executor was the first to notice it did not say which: that is asked for here.
        """
        assert self._capacity is not None
        assert self._estimator is not None
        assert self.placement is not None
        lost = set(self._lost_pools)
        if not lost:
            answers = await asyncio.gather(*(watch.is_lost() for watch in self._watches))
            lost = {pool for pool, is_lost in enumerate(answers) if is_lost}
        for pool in lost:
            self.placement = self.placement.with_pool(pool, num_blocks=0, num_threads=0, error="lost")
        self._capacity = replace(self._capacity, host_pools=tuple(pool.num_blocks for pool in self.placement.pools))
        self._epoch += 1
        self._engine.open(self._capacity, self._estimator, self._epoch)

    async def _drive(self) -> EpochEnd:
        """Feeds plans and takes results until the epoch is over. Raises ExecutorLostError."""
        stream = self._executor.execute()
        results: deque[IterationResult | Exception] = deque()
        reader = asyncio.create_task(self._read(stream, results))
        self._requested_end = None
        self._lost_pools.clear()
        self._driving = True
        try:
            return await self._exchange(stream, results)
        finally:
            self._driving = False
            reader.cancel()
            stream.close()

    async def _exchange(self, stream: PlanStream, results: "deque[IterationResult | Exception]") -> EpochEnd:
        assert self.placement is not None
        device = self.placement.device
        in_flight: deque[IterationPlan] = deque()
        self._engine.wake.set()
        while True:
            await self._engine.wake.wait()
            self._engine.wake.clear()
            tokens: list[TokenEvent] = []
            applied: list[tuple[IterationPlan, IterationResult]] = []
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
                    applied.append((plan, result))
                    tokens += self._engine.apply(result)
                    for watch in self._watches:
                        watch.cores.observe(result)
                    if result.trace is not None:
                        self._traces.publish(replace(result.trace, predicted_ns=round(plan.predicted_s * 1e9)))
            # Plan first: the executor must not wait while text is made of tokens.
            while end is None and len(in_flight) < PLANS_AHEAD and (next_plan := self._engine.plan()):
                for watch, num_in_pool in zip(self._watches, self._engine.num_by_pool, strict=True):
                    watch.cores.planned(next_plan, num_in_pool)
                next_plan = self._meters.planned(next_plan)
                await stream.send(replace(next_plan, trace=True) if self._traces.are_wanted else next_plan)
                in_flight.append(next_plan)
            self._engine.deliver(tokens)
            for plan, result in applied:
                self._meters.applied(plan, result, device)
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

    def _end_of(self, result: IterationResult) -> EpochEnd:
        assert result.error is not None
        with self._meters.failed(result):
            logger.error("iteration %d failed: %s: %s", result.iteration, result.error.value, result.error_message)
        return EpochEnd.HOST_LOST if result.error is ExecutionError.CPU_ATTENTION_LOST else EpochEnd.FAILED

    # --- the CPU attention services

    async def _watch_host(self, pool: int) -> None:
        """Each second: has an attached service gone or restarted, has one that was missed come back?"""
        watch = self._watches[pool]
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            epoch = self._epoch
            with contextlib.suppress(TimeoutError):
                status = await watch.status()
                if self._driving and self._epoch == epoch:
                    self._compare(pool, status)
                    if status and status.region_epoch == epoch:
                        await watch.adjust_threads()
                        await self._consider_policy(epoch)

    async def _consider_policy(self, epoch: int) -> None:
        """With the service attached: without it there is one policy only. A search may take a second."""
        if self._policies is None:
            return
        policy = await asyncio.to_thread(self._policies.consider, self._engine.demand, time.monotonic())
        if policy is not None and self._epoch == epoch:
            self.change_policy(policy)

    def _compare(self, pool: int, status: HostStatus | None) -> None:
        """`status` is None where nobody answers."""
        assert self._capacity is not None
        assert self.placement is not None
        watch = self._watches[pool]
        if self._capacity.host_pools[pool] > 0:
            if status is None or status.region_epoch != self._epoch:
                self._lost_pools.add(pool)
                self._request_end(EpochEnd.HOST_LOST)
            else:
                watch.cores.note(status)
                self.placement = self.placement.with_pool(
                    pool, num_threads=status.num_threads, thread_limits=watch.cores.limits
                )
        elif status is not None and watch.may_be_attached and self._requested_end is None:
            self._request_end(EpochEnd.HOST_BACK)

    def _request_end(self, end: EpochEnd) -> None:
        self._requested_end = end
        self._engine.wake.set()
