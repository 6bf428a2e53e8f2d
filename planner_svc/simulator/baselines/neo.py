"""NEO's published rules (MLSys 2025, section 4, and what its paper reports of its scheduler), written anew.

No chunked prefill, no targets, no ageing; its traps are its own.
"""

from collections import deque
from dataclasses import dataclass, field

from planner_svc.estimator import RooflineEstimator
from planner_svc.scheduler import Applied, Capacity, SequenceRequest
from planner_svc.simulator.baselines.records import Record, take_tokens
from svc_common.plan import IterationPlan, IterationResult, Mode, PrefillChunk, SubBatch, Swap, Tier

_SWAP_IN_SHARE = 0.95
"""Of the GPU's blocks, that prompts and swapping in may fill."""
_SMALLEST_BATCH_TOKENS = 128
"""With fewer, linear operations leave the GPU's arithmetic idle: prompts are not held back then."""


@dataclass(slots=True)
class _Half:
    """A sub-batch and its times of one layer, as NEO predicts them."""

    estimator: RooflineEstimator
    lnch_s: float
    prefills: list[tuple[Record, Tier]] = field(default_factory=list)
    gpu_decodes: list[Record] = field(default_factory=list)
    cpu_decodes: list[Record] = field(default_factory=list)
    num_tokens: int = 0
    prefill_s: float = 0.0
    gpu_context: int = 0
    cpu_context: int = 0

    def __len__(self) -> int:
        return len(self.prefills) + len(self.gpu_decodes) + len(self.cpu_decodes)

    def add_prefill(self, record: Record, tier: Tier) -> None:
        self.prefills.append((record, tier))
        self.num_tokens += record.num_tokens
        self.prefill_s += self.estimator.prefill_s(record.num_tokens, 0)

    def pop_prefill(self) -> tuple[Record, Tier]:
        record, tier = self.prefills.pop()
        self.num_tokens -= record.num_tokens
        self.prefill_s -= self.estimator.prefill_s(record.num_tokens, 0)
        return record, tier

    def add_gpu_decode(self, record: Record) -> None:
        self.gpu_decodes.append(record)
        self.num_tokens += 1
        self.gpu_context += record.num_tokens

    def add_cpu_decode(self, record: Record) -> None:
        self.cpu_decodes.append(record)
        self.num_tokens += 1
        self.cpu_context += record.num_tokens

    def pop_cpu_decode(self) -> None:
        self.num_tokens -= 1
        self.cpu_context -= self.cpu_decodes.pop().num_tokens

    @property
    def linear_s(self) -> float:
        return self.estimator.linear_s(self.num_tokens)

    @property
    def gpu_s(self) -> float:
        """Attention on the GPU."""
        return self.prefill_s + self.estimator.gpu_decode_s(len(self.gpu_decodes), self.gpu_context)

    @property
    def cpu_s(self) -> float:
        return self.lnch_s + self.estimator.cpu_decode_s(len(self.cpu_decodes), self.cpu_context)


class Neo:
    """Plans the next iteration when the last one is over."""

    def __init__(self, capacity: Capacity, estimator: RooflineEstimator, believed_launch_s: float) -> None:
        """`believed_launch_s`: of one layer, what NEO adds to the CPU's attention."""
        self._capacity = capacity
        self._estimator = estimator
        self._launch_s = believed_launch_s
        self._waiting: deque[Record] = deque()
        self._on_gpu: list[Record] = []
        self._on_cpu: deque[Record] = deque()
        self._records: dict[int, Record] = {}
        self._released: list[int] = []
        self._iteration = 0
        self._is_planned = False
        self._num_added = 0

    def add(self, request: SequenceRequest, now: float) -> int:
        self._num_added += 1
        record = Record(self._num_added, request)
        self._waiting.append(record)
        self._records[record.sequence_id] = record
        return record.sequence_id

    def plan(self, now: float) -> IterationPlan | None:
        """None also where NEO finds nothing to run though requests wait: one of its traps."""
        if self._is_planned or not self._records:
            return None
        swaps, gpu_blocks, budget = self._place_decodes()
        to_gpu, to_cpu = self._choose_prompts(gpu_blocks, budget)
        halves = self._make_batches(to_gpu, to_cpu, budget - sum(item.num_tokens for item in to_gpu + to_cpu))
        halves = [half for half in halves if len(half)]
        if not halves:
            return None
        new = []
        for record, tier in halves[0].prefills:
            self._waiting.remove(record)
            new.append(record.begin(tier))
            (self._on_gpu if tier is Tier.GPU else self._on_cpu).append(record)
        self._is_planned = True
        self._iteration += 1
        released, self._released = tuple(self._released), []
        mode = Mode.ASYMMETRIC if any(half.cpu_decodes for half in halves) else Mode.GPU_ONLY
        batches = tuple(_sub_batch(half) for half in halves)
        return IterationPlan(
            1, self._iteration, mode, released=released, new_sequences=tuple(new), swaps=swaps, sub_batches=batches
        )

    def apply(self, result: IterationResult, now: float) -> Applied:
        self._is_planned = False
        applied, ended = take_tokens(self._records, result)
        for record in ended:
            (self._on_gpu if record in self._on_gpu else self._on_cpu).remove(record)
            self._released.append(record.sequence_id)
        return applied

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._on_gpu) + len(self._on_cpu)

    @property
    def gpu_blocks_used(self) -> int:
        return sum(self._blocks(item) for item in self._on_gpu)

    @property
    def host_blocks_used(self) -> int:
        return sum(self._blocks(item) for item in self._on_cpu)

    def _blocks(self, record: Record) -> int:
        return self._capacity.blocks_for(record.num_tokens)

    def _place_decodes(self) -> tuple[tuple[Swap, ...], int, int]:
        """Swaps out the latest while the GPU is over-full, or in the first on the CPU while it is under 95 %.

        Returns the swaps, the blocks then used on the GPU, and the tokens left of the budget.
        """
        budget = self._capacity.max_batch_tokens - len(self._on_gpu)
        used = self.gpu_blocks_used
        swaps: list[Swap] = []
        while self._on_gpu and (budget < 0 or used > self._capacity.gpu_blocks):
            victim = self._on_gpu.pop()
            self._on_cpu.appendleft(victim)
            swaps.append(Swap(victim.sequence_id, Tier.HOST, ()))
            used -= self._blocks(victim)
            budget += 1
        while self._on_cpu and not (swaps and swaps[0].target is Tier.HOST) and budget:
            needed = used + self._blocks(self._on_cpu[0])
            if needed > round(_SWAP_IN_SHARE * self._capacity.gpu_blocks):
                break
            used = needed
            budget -= 1
            record = self._on_cpu.popleft()
            self._on_gpu.append(record)
            swaps.append(Swap(record.sequence_id, Tier.GPU, ()))
        return tuple(swaps), used, budget

    def _choose_prompts(self, gpu_blocks: int, budget: int) -> tuple[list[Record], list[Record]]:
        """For the GPU up to 95 % of it, then for the CPU; whole prompts, in order of arrival."""
        to_gpu: list[Record] = []
        to_cpu: list[Record] = []
        cpu_blocks = self.host_blocks_used
        cpu_limit = self._capacity.host_blocks - self._capacity.gpu_blocks
        passing_blocks = 0
        for record in self._waiting:
            blocks = self._blocks(record)
            if record.num_tokens > budget or cpu_blocks + blocks > cpu_limit:
                break
            if not to_cpu and gpu_blocks + blocks <= round(_SWAP_IN_SHARE * self._capacity.gpu_blocks):
                to_gpu.append(record)
                gpu_blocks += blocks
            else:
                passing_blocks += blocks
                if passing_blocks > self._capacity.gpu_blocks:
                    break
                to_cpu.append(record)
                cpu_blocks += blocks
            budget -= record.num_tokens
        return to_gpu, to_cpu

    def _make_batches(self, to_gpu: list[Record], to_cpu: list[Record], budget: int) -> list[_Half]:
        """Both candidates; the one with more tokens a second."""
        gpu_only, first, second = (_Half(self._estimator, self._launch_s) for _ in range(3))
        for half in (gpu_only, first):
            for record in to_gpu:
                half.add_prefill(record, Tier.GPU)
            for record in self._on_gpu:
                half.add_gpu_decode(record)
        for record in to_cpu:
            first.add_prefill(record, Tier.HOST)
        halves = (first, second)
        self._place_cpu_decodes(halves, budget)
        while first.prefills and first.prefills[-1][1] is Tier.HOST:
            record, tier = first.pop_prefill()
            if min(_slack(halves)) < 0 or first.num_tokens < _SMALLEST_BATCH_TOKENS:
                first.add_prefill(record, tier)
                break
        if not len(second):
            return [first]
        alone_s = gpu_only.linear_s + gpu_only.gpu_s
        both_s = max(first.linear_s, second.cpu_s) + max(second.linear_s + first.gpu_s, first.cpu_s)
        if gpu_only.num_tokens / alone_s > (first.num_tokens + second.num_tokens) / both_s:
            return [gpu_only]
        return [first, second]

    def _place_cpu_decodes(self, halves: tuple[_Half, _Half], budget: int) -> None:
        """Each to the half with more slack; none that would make the GPU wait."""
        index, shortest_refused = 1, float("inf")
        for record in self._on_cpu:
            if budget == 0:
                return
            if record.num_tokens >= shortest_refused:
                continue
            halves[index].add_cpu_decode(record)
            slack = _slack(halves)
            if min(slack) < 0:
                halves[index].pop_cpu_decode()
                shortest_refused = record.num_tokens
                continue
            budget -= 1
            index = 1 if slack[1] > slack[0] else 0


def _slack(halves: tuple[_Half, _Half]) -> tuple[float, float]:
    """What the CPU attention of either half leaves of the GPU's work beside it.

    All attention on the GPU, prompts included, is the first half's; beside it run the second one's linear operations.
    """
    first, second = halves
    return second.linear_s + first.gpu_s - first.cpu_s, first.linear_s - second.cpu_s


def _sub_batch(half: _Half) -> SubBatch:
    return SubBatch(
        prefills=tuple(PrefillChunk(record.sequence_id, 0, record.num_tokens) for record, _ in half.prefills),
        gpu_decodes=tuple(record.sequence_id for record in half.gpu_decodes),
        cpu_decodes=tuple(record.sequence_id for record in half.cpu_decodes),
    )
