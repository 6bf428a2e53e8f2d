"""Keeps the executor busy: one plan runs and one waits, epoch after epoch, whatever becomes of the other services."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from planner_svc import refusals
from planner_svc.drive import Drive, EpochEnd
from planner_svc.engine import Engine
from planner_svc.epochs import Epochs
from planner_svc.executor_client import (
    EpochRefusedError,
    ExecutorClient,
    ExecutorLostError,
    HostStatus,
    Placement,
)
from planner_svc.host_watch import PROBE_EVERY_S, HostWatch
from planner_svc.iteration_meters import IterationMeters
from planner_svc.policy_keeper import PolicyKeeper
from planner_svc.scheduler import Capacity
from planner_svc.traces import Traces
from svc_common.errors import unavailable
from svc_common.policy import ExecutionPolicy

_RETRY_S = 1.0
_RECONNECT_S = 0.1
"""Before one that was lost is looked for; from then on its connection waits for it."""
_MAX_RETRY_S = 30.0
"""Between tries to open an epoch that the executor refuses: each may cost it a measurement."""

logger = logging.getLogger(__name__)


class ExecutorStopsError(ExecutorLostError):
    """It ends in order: for requests as a loss, and none of its own."""


class ExecutorLoop:
    """Owns the connection to gpu_svc, and has an eye on each cpu_attn_svc."""

    def __init__(
        self,
        engine: Engine,
        executor: ExecutorClient,
        epochs: Epochs,
        watches: Sequence[HostWatch],
        traces: Traces,
        meters: IterationMeters,
        wait_s: float,
        policies: PolicyKeeper | None = None,
    ) -> None:
        """`watches`: one for each CPU attention service that is configured, by its pool.

        Requests wait for a lost executor for `wait_s` at most. `policies` may change where layers run.
        """
        self._engine = engine
        self._executor = executor
        self._epochs = epochs
        self._watches = tuple(watches)
        self._meters = meters
        self._wait_s = wait_s
        self._policies = policies
        self._policy_before: ExecutionPolicy | None = None
        """The latest change was from this one."""
        self._narrow: dict[ExecutionPolicy | None, Capacity] = {}
        """Of policies that had no room for all requests in hand."""
        self._drive = Drive(engine, executor, watches, traces, meters)
        self._patience: asyncio.TimerHandle | None = None
        """While requests wait for a lost executor."""
        self._retry_s = _RECONNECT_S
        """Until the executor is to be tried again."""
        self._is_wary = False
        """The executor was lost while grammars were made ready."""

    @property
    def placement(self) -> Placement | None:
        """Of the latest epoch; None before the first."""
        return self._epochs.placement

    async def run(self) -> None:
        """Never returns; to be cancelled."""
        watchers = [asyncio.create_task(self._watch_host(pool)) for pool in range(len(self._watches))]
        watchers.append(asyncio.create_task(self._watch_executor()))
        try:
            while True:
                await self._serve_until_lost()
                await asyncio.sleep(self._retry_s)
        finally:
            for watcher in watchers:
                watcher.cancel()

    async def _serve_until_lost(self) -> None:
        """From finding the executor to losing it."""
        try:
            await self._epochs.connect(hosts_too=bool(self._engine.in_hand))
            await self._epochs.open_first()
            await self._make_grammars_ready()
            self._hand_over()
            while (end := await self._drive_epoch()) is not EpochEnd.EXECUTOR_STOPS:
                await self._next_epoch(end)
            raise ExecutorStopsError(end.value)
        except ExecutorLostError as error:
            self._await_executor(error)
        except Exception:
            logger.exception("the engine failed; all requests end and the executor is opened afresh")
            self._meters.epoch_ended("engine_failed")
            self._retry_s = _RETRY_S
            self._engine.abandon(unavailable("ENGINE_FAILED", "the engine failed and is restarting", _RETRY_S))

    async def _make_grammars_ready(self) -> None:
        """Those of requests in hand, so that no iteration waits for them. Raises ExecutorLostError.

        Where the executor is lost at that, the next one is spared: then it shows in an iteration who is to blame.
        """
        if self._is_wary:
            self._is_wary = False
            return
        for grammar in self._engine.in_hand.grammars:
            self._is_wary = True
            await self._executor.compile_grammar(grammar)  # What it says of one, its sequence will be told.
        self._is_wary = False

    def _await_executor(self, error: ExecutorLostError) -> None:
        """Requests wait for it to come back, which is tried again and again."""
        is_refusal = isinstance(error, EpochRefusedError)
        if self._engine.availability.is_open:
            if is_wanted := isinstance(error, ExecutorStopsError):
                logger.warning("executor let go: %s", error)
                self._meters.epoch_ended("executor_stops")
            else:
                logger.error("executor lost: %s", error)
                self._meters.epoch_ended("executor_lost")
            is_certain = not self._executor.was_compiling
            self._engine.lose_executor(self._drive.running_ids, is_certain, is_wanted)
            if self._wait_s > 0:
                self._patience = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)
            else:
                self._give_up()
        self._retry_s = min(max(_RETRY_S, 2 * self._retry_s), _MAX_RETRY_S) if is_refusal else _RECONNECT_S
        # Said once, however often it is tried.
        if self._engine.availability.explain(str(error) if is_refusal else "") and is_refusal:
            logger.warning("not ready: %s", error)

    def _give_up(self) -> None:
        self._engine.close(refusals.executor_lost(self._wait_s, _RETRY_S))

    def _hand_over(self) -> None:
        """The epoch that was opened is the engine's."""
        epochs = self._epochs
        assert epochs.capacity is not None
        assert epochs.estimator is not None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._retry_s = _RECONNECT_S
        for watch in self._watches:
            watch.cores.begin_epoch()
        self._engine.open(epochs.capacity, epochs.estimator, epochs.number)

    async def _next_epoch(self, end: EpochEnd) -> None:
        """Carries the requests in hand over into a new epoch."""
        logger.warning("epoch %d ends: %s", self._epochs.number, end.value)
        self._meters.epoch_ended(end.name.lower())
        if end is EpochEnd.FAILED:
            self._engine.note_failure(self._drive.failed_ids)
        if end in (EpochEnd.HOST_LOST, EpochEnd.HOST_STOPS):
            await self._tell_who_is_lost()
        self._drive.forget_plans()
        self._engine.suspend()
        if end is EpochEnd.FAILED and not self._drive.has_progressed:
            await asyncio.sleep(_RETRY_S)  # It may be the device: not as fast as epochs can be opened.
        await self._epochs.open_next(host_is_back=end is EpochEnd.HOST_BACK)
        if end is EpochEnd.POLICY:
            await self._make_sure_of_room()
        self._hand_over()

    async def _make_sure_of_room(self) -> None:
        """Where layers run decides how much KV there is room for: no request in hand is to end for a faster policy."""
        epochs = self._epochs
        assert epochs.capacity is not None
        if self._engine.all_fit(epochs.capacity) or not all(epochs.capacity.host_pools):
            return
        logger.info("not all requests in hand fit beside these layers: they run as before")
        self._narrow[epochs.policy] = epochs.capacity
        epochs.policy = self._policy_before
        await epochs.open_next(host_is_back=False)

    def change_policy(self, policy: ExecutionPolicy | None) -> None:
        """Layers run as `policy` says from a new epoch on, which begins at once.

        Requests in hand go on in it, computed again from prompt and tokens so far; where one of them has no room there,
        layers run as before. No policy: the executor's own.
        """
        if policy == self._epochs.policy:
            return
        self._policy_before, self._epochs.policy = self._epochs.policy, policy
        if self._drive.is_under_way:
            self._drive.request_end(EpochEnd.POLICY)

    async def _tell_who_is_lost(self) -> None:
        """Ends requests that fit nowhere else, before the executor has given up on a service and the next epoch is."""
        epochs = self._epochs
        await epochs.lose_hosts(self._drive.lost_pools)
        assert epochs.capacity is not None
        assert epochs.estimator is not None
        self._engine.open(epochs.capacity, epochs.estimator, epochs.number)

    async def _drive_epoch(self) -> EpochEnd:
        """Raises ExecutorLostError."""
        assert self.placement is not None
        return await self._drive.run(self.placement.device)

    # --- the CPU attention services

    async def _watch_host(self, pool: int) -> None:
        """Each second: has an attached service gone or restarted, has one that was missed come back?"""
        watch = self._watches[pool]
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            epoch = self._epochs.number
            with contextlib.suppress(TimeoutError):
                status = await watch.status()
                if self._drive.is_under_way and self._epochs.number == epoch:
                    self._compare(pool, status)
                    if status and status.region_epoch == epoch:
                        await watch.adjust_threads()
                        await self._consider_policy(epoch)

    async def _consider_policy(self, epoch: int) -> None:
        """With the service attached: without it there is one policy only. A search may take a second."""
        if self._policies is None:
            return
        if self._engine.is_draining:
            return
        policy = await asyncio.to_thread(self._policies.consider, self._engine.demand, time.monotonic())
        if policy is None or self._epochs.number != epoch or self._engine.is_draining:
            return
        narrow = self._narrow.get(policy)
        if narrow is None or self._engine.all_fit(narrow):
            self.change_policy(policy)

    def _compare(self, pool: int, status: HostStatus | None) -> None:
        """`status` is None where nobody answers."""
        epochs = self._epochs
        assert epochs.capacity is not None
        assert epochs.placement is not None
        watch = self._watches[pool]
        if epochs.capacity.host_pools[pool] > 0:
            if status is None or status.region_epoch != epochs.number:
                self._drive.request_end(EpochEnd.HOST_LOST, lost_pool=pool)
            elif watch.must_be_let_go(status) and not self._engine.is_draining:
                self._drive.request_end(EpochEnd.HOST_STOPS, lost_pool=pool)
            else:
                watch.cores.note(status)
                epochs.placement = epochs.placement.with_pool(
                    pool, num_threads=status.num_threads, thread_limits=watch.cores.limits
                )
        elif status is not None and self._may_attach(watch, status):
            self._drive.request_end(EpochEnd.HOST_BACK)

    def _may_attach(self, watch: HostWatch, status: HostStatus) -> bool:
        """Whether it is worth a new epoch."""
        is_wanted = self._drive.requested_end is None and not self._engine.is_draining
        return is_wanted and not status.is_stopping and watch.may_be_attached

    # --- the executor

    async def _watch_executor(self) -> None:
        """Each second: has it been told to stop, and this planner not? Then it gets no more plans, and may end."""
        was_stopping = False
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            epoch, is_stopping = self._epochs.number, self._drive.is_under_way and await self._executor.is_stopping()
            if is_stopping and was_stopping and self._epochs.number == epoch and not self._engine.is_draining:
                self._drive.request_end(EpochEnd.EXECUTOR_STOPS)
            was_stopping = is_stopping

    async def describe(self) -> str:
        """What the other services say of themselves, a line each."""
        lines = await asyncio.gather(self._executor.describe(), *(watch.describe() for watch in self._watches))
        return "\n".join([f"executor: {lines[0]}", *(f"CPU attention at {line}" for line in lines[1:])])

    @property
    def state_text(self) -> str:
        """In one line."""
        ends = f", ends: {self._drive.requested_end.value}" if self._drive.requested_end else ""
        return f"epoch {self._epochs.number}, {'driving' if self._drive.is_under_way else 'between two epochs'}{ends}"
