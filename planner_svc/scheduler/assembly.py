"""Gathers what the next iteration could compute, and what it may take: between the queues and the decision."""

from planner_svc.estimator import Calibration
from planner_svc.scheduler.candidates import Shape, Work
from planner_svc.scheduler.cohort import Cohort
from planner_svc.scheduler.costs import Costs
from planner_svc.scheduler.decision import Bounds
from planner_svc.scheduler.limits import Capacity, ModePolicy
from planner_svc.scheduler.pace import Mix, Pace
from planner_svc.scheduler.placement import Decodes, Placement
from planner_svc.scheduler.prompts import Prompts, needed_tokens_per_s
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence
from planner_svc.scheduler.urgency import bounds
from planner_svc.scheduler.waiting import WaitingQueue
from svc_common.plan import Mode, Tier


class Assembly:
    """Lives as long as an epoch; changes nothing."""

    def __init__(
        self,
        capacity: Capacity,
        calibration: Calibration,
        policy: ModePolicy,
        residency: Residency,
        placement: Placement,
        queue: WaitingQueue,
        mix: Mix,
        costs: Costs,
    ) -> None:
        self._capacity = capacity
        self._estimator = calibration.estimator
        self._calibration = calibration
        self._policy = policy
        self._residency = residency
        self._placement = placement
        self._queue = queue
        self._mix = mix
        self._costs = costs

    def collect(self, decodes: Decodes, cohort: Cohort, start_s: float) -> tuple[Work, Bounds, list[Sequence]]:
        """What could run, how long it may take, and the prompts held back for want of the CPU's time."""
        capacity, residency = self._capacity, self._residency
        members = cohort.members if cohort.is_under_way else self._stepping(decodes.host)
        work = Work(
            self._estimator,
            decodes.gpu,
            decodes.host,
            self._swap_bytes(),
            members,
            cohort.next_layer,
            num_pools=len(capacity.host_pools),
        )
        longest_s = self._longest_s(work, decodes, start_s)
        # Prompts get what decodes leave, those on the CPU included, so that they never crowd them out.
        budget = capacity.max_batch_tokens - len(decodes.gpu) - len(decodes.host) - len(cohort.members)
        if longest_s == float("inf"):
            budget = min(budget, self._costs.most_tokens)
        ratio = self._mix.prefill_per_decode
        pace = self._pace(ratio)
        prompts = Prompts(capacity, residency, self._placement, self._queue, pace)
        chunks = prompts.propose(budget, start_s, self._costs.prefill_tokens_per_s)
        work.take(chunks)
        is_pressed = prompts.is_crowded and longest_s == float("inf")
        limits = Bounds(
            longest_s=longest_s,
            num_prefill_tokens=budget,
            num_free_tokens=self._costs.knee_tokens,
            prefill_tokens_per_s=needed_tokens_per_s(chunks, start_s),
            num_paced=self._num_paced(decodes, pace) if is_pressed else None,
            runs_cpu=is_pressed and pace.is_worthwhile(),
            prefill_worth=1 / max(ratio, 1e-3),
        )
        return work, limits, prompts.held_back

    def _num_paced(self, decodes: Decodes, pace: Pace) -> float | None:
        """Decodes of an iteration once both tiers hold what they should: prompts must follow one another as these end.

        Computed as fast as there is room, they would all decode, and end, at the same time, and the CPU would have
        nothing to hide behind. None where it takes no part: the GPU alone gains by fewer and larger iterations.
        """
        has_cpu = self._capacity.host_blocks > 0 and self._placement.computes_in(Tier.HOST)
        num_cpu_decodes = pace.num_best_cpu_decodes() if has_cpu else 0
        if num_cpu_decodes == 0:
            return None
        free_tokens = self._residency.free(Tier.GPU) * self._capacity.block_tokens
        num_to_come = free_tokens / (self._mix.prompt_tokens + self._mix.output_tokens / 2)
        return len(decodes.gpu) + num_to_come + num_cpu_decodes

    def _stepping(self, host_decodes: list[Sequence]) -> list[Sequence]:
        """Who would go as a cohort: all, but nobody as long as one is due, since a step takes many iterations."""
        if self._capacity.has_cpu_layers:
            return []
        if self._policy == "decoupled" or (self._policy == "auto" and not any(map(bounds, host_decodes))):
            return host_decodes
        return []

    def _swap_bytes(self) -> tuple[int, int]:
        """Out to the host and in to the GPU, of the moves decided so far."""
        num_blocks = dict.fromkeys(Tier, 0)
        for swap in self._residency.changes.swaps.values():
            num_blocks[swap.target] += len(swap.blocks)
        size = self._capacity.block_bytes
        return num_blocks[Tier.HOST] * size, num_blocks[Tier.GPU] * size

    def _longest_s(self, work: Work, decodes: Decodes, start_s: float) -> float:
        """Until the first due token that can still come in time; inf where there is none."""
        earliest_s = start_s + work.seconds(Shape(0, 0)) * self._calibration.factor(Mode.GPU_ONLY)
        first_due_s = float("inf")
        for item in (*decodes.gpu, *decodes.host):
            if earliest_s <= item.due_s < first_due_s and bounds(item):
                first_due_s = item.due_s
        return first_due_s - start_s

    def _pace(self, prefill_per_decode: float) -> Pace:
        return Pace(
            self._estimator,
            self._calibration,
            self._residency.sequences,
            max_tokens=self._capacity.max_batch_tokens,
            max_sequences=self._capacity.max_sequences,
            prefill_per_decode=prefill_per_decode if len(self._queue) else 0.0,
            num_waiting=len(self._queue),
            admits_all=self._policy != "auto",
            pool_shares=self._placement.pools.shares(),
        )
