"""Opens epochs: finds the executor, agrees with it on blocks and layers, and keeps what it measured."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner_svc.estimator import OperationTables, TableEstimator
from planner_svc.executor_client import EpochLimits, EpochRefusedError, ExecutorClient, ExecutorLostError, Placement
from planner_svc.host_watch import HostWatch
from planner_svc.policy_keeper import PolicyKeeper
from planner_svc.policy_tables import MakeEstimator, PolicyTables
from planner_svc.scheduler import Capacity
from svc_common.memory import size_text
from svc_common.policy import ExecutionPolicy

_CONNECT_S = 10.0
_LOOK_AGAIN_S = 0.2
"""For an executor that is not there yet, or loads its model."""
_HOSTS_BACK_S = 10.0
"""So long CPU attention services that went with the executor may take to answer."""

logger = logging.getLogger(__name__)


class Epochs:
    """One after the other. `capacity`, `estimator` and `placement` are those of the latest."""

    def __init__(
        self,
        executor: ExecutorClient,
        watches: Sequence[HostWatch],
        limits: EpochLimits,
        block_tokens: int,
        model_digest: str,
        make_estimator: MakeEstimator,
        policy: ExecutionPolicy | None = None,
        policies: PolicyKeeper | None = None,
    ) -> None:
        """`watches`: one for each CPU attention service that is configured, by its pool.

        Without a policy layers run where the executor puts them, or, if not all fit there, where `policies` says.
        """
        self._executor = executor
        self._watches = tuple(watches)
        self._limits = limits
        self._block_tokens = block_tokens
        self._model_digest = model_digest
        self._policies = policies
        self._tables = PolicyTables(make_estimator)
        self._has_restarted = True
        """The executor, since the last epoch it was in."""
        self.policy = policy
        """Of the next epoch."""
        self._good_policy = policy
        """Of the latest that was opened."""
        self.number = time.time_ns()  # Later than any epoch of a planner before this one.
        self.capacity: Capacity | None = None
        self.estimator: TableEstimator | None = None
        self.placement: Placement | None = None
        """None before the first."""

    async def connect(self, hosts_too: bool) -> None:
        """Waits for gpu_svc. Before the first epoch for all others too, so that start-up order does not matter.

        `hosts_too`: later on also for those that were attached, but not for long.
        """
        if self.placement is None:
            for watch in self._watches:
                await watch.until_it_answers()
        said = ""
        while True:
            try:
                last = await self._executor.last_epoch(_CONNECT_S)
                break
            except ExecutorLostError as error:
                if said != str(error):
                    said = str(error)
                    logger.info("waiting for the executor: %s", error)
                await asyncio.sleep(_LOOK_AGAIN_S)
        self._has_restarted = self.placement is None or last < self.number
        # Later than what another planner with a faster clock may have opened.
        self.number = max(self.number, last)
        if hosts_too and self.placement is not None:
            attached = [
                watch for watch, pool in zip(self._watches, self.placement.pools, strict=True) if pool.num_blocks
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HOSTS_BACK_S):
                    await asyncio.gather(*(watch.until_it_answers() for watch in attached))

    async def open_first(self) -> None:
        """The first epoch after `connect`. Raises ExecutorLostError."""
        await self.open(profile=self._has_restarted)
        await self._choose_first_policy()

    async def open_next(self, host_is_back: bool) -> None:
        """The next epoch of an executor that is well. Raises ExecutorLostError."""
        # Tables measured without the host say nothing about attention there.
        tables = self._tables.tables(self.policy)
        await self.open(profile=host_is_back and tables is not None and not tables.cpu_decode)

    async def open(self, profile: bool) -> None:
        """Opens the next epoch, with operations measured anew or by what is known. Raises ExecutorLostError."""
        try:
            placement, tables = await self._open(profile or not self._tables.knows(self.policy))
        except EpochRefusedError:
            self.policy = self._good_policy  # The next try is to go well.
            raise
        if tables is None and not self._tables.knows(placement.policy):
            # Not as it was asked for: the CPU attention service, and with it its layers, has gone since.
            placement, tables = await self._open(profile=True)
        self._note_attachments(placement)
        if tables is not None:
            # What was asked for is known by that name only as long as it is what there is.
            has_all = placement.host_blocks > 0 or not self._watches or self.policy is None
            self._tables.add(tables, placement.policy, self.policy if has_all else placement.policy)
        self.estimator = self._tables.estimator(placement.policy)
        if self.estimator is None:
            raise EpochRefusedError("the executor measured no tables")
        if tables is not None:
            for watch, pool in zip(self._watches, placement.pools, strict=True):
                watch.cores.measured(self.estimator, pool.num_threads)
        self.estimator.stream(placement.streamed_layers, placement.streamed_bytes)
        self.capacity = Capacity(
            gpu_blocks=placement.gpu_blocks,
            host_pools=tuple(pool.num_blocks for pool in placement.pools),
            block_tokens=self._block_tokens,
            max_sequences=self._limits.max_sequences,
            max_batch_tokens=self._limits.max_batch_tokens,
            max_sequence_tokens=self._limits.max_sequence_tokens,
            block_bytes=placement.host_block_bytes,
            has_cpu_layers=placement.policy is not None and placement.policy.decode_cpu_layers > 0,
        )
        self.placement, self._good_policy = placement, self.policy
        if self._policies:
            self._policies.opened(placement, time.monotonic())
        self._log(placement)

    async def _open(self, profile: bool) -> tuple[Placement, OperationTables | None]:
        self.number += 1
        return await self._executor.open_epoch(self.number, self._limits, profile, self.policy)

    def _note_attachments(self, placement: Placement) -> None:
        """Raises EpochRefusedError where the executor is not the one that is configured, or is not yet complete."""
        if placement.model_digest != self._model_digest:
            raise EpochRefusedError(
                f"gpu_svc serves another model than this planner: digest {placement.model_digest}, "
                f"not {self._model_digest}"
            )
        if len(placement.pools) != len(self._watches):
            raise EpochRefusedError(
                f"gpu_svc has {len(placement.pools)} CPU attention services, the planner is configured for "
                f"{len(self._watches)}"
            )
        for watch, pool in zip(self._watches, placement.pools, strict=True):
            watch.note_attachment(pool.num_blocks > 0)
        if self.placement is None and not all(pool.num_blocks for pool in placement.pools):
            raise EpochRefusedError(f"not all CPU attention is there at the first start: {placement.errors}")

    async def _choose_first_policy(self) -> None:
        """Measures layers on the CPU where some don't fit on the device, and opens an epoch by the policy chosen."""
        assert self.placement is not None
        policy = self._policies.to_measure(self.placement) if self._policies else None
        if self._policies is None or policy is None:
            return
        before, self.policy = self.policy, policy
        try:
            await self.open(profile=True)
        except EpochRefusedError as error:
            logger.warning("no layers will run on the CPU: %s", error)
            await self.open(profile=False)
            return
        tables = self._tables.tables(self.placement.policy)
        assert tables is not None
        chosen = await asyncio.to_thread(self._policies.measured, self.placement, tables)
        self._tables.of_both = self._policies.tables
        self.policy = chosen or before
        await self.open(profile=False)

    async def lose_hosts(self, lost: Iterable[int]) -> None:
        """An epoch on paper without these pools, before the executor has given up on them and opened the next one.

        Where none is given, the executor was the first to notice and did not say which: that is asked for here.
        """
        assert self.capacity is not None
        assert self.placement is not None
        lost = set(lost)
        if not lost:
            answers = await asyncio.gather(*(watch.is_lost() for watch in self._watches))
            lost = {pool for pool, is_lost in enumerate(answers) if is_lost}
        for pool in lost:
            self.placement = self.placement.with_pool(pool, num_blocks=0, num_threads=0, error="lost")
        self.capacity = replace(self.capacity, host_pools=tuple(pool.num_blocks for pool in self.placement.pools))
        self.number += 1

    def _log(self, placement: Placement) -> None:
        logger.info(
            "on the device weights %s, buffers %s, KV %s; in host memory weights %s, KV %s",
            size_text(placement.weight_bytes),
            size_text(placement.buffer_bytes),
            size_text(placement.gpu_kv_bytes),
            size_text(placement.host_weight_bytes),
            size_text(placement.host_kv_bytes),
        )
        logger.info(
            "epoch %d: %s, %s, KV %s, on the host %s, %d GPU blocks, %s host blocks of %d tokens, "
            "%s CPU attention threads%s%s",
            self.number,
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
