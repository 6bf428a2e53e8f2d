"""The GPU alone, as vLLM schedules: continuous batching, chunked prefill, preemption by recomputation."""

from collections import deque

from planner_svc.scheduler import Applied, Capacity, SequenceRequest
from planner_svc.simulator.baselines.records import Record, take_tokens
from svc_common.plan import IterationPlan, IterationResult, Mode, NewSequence, PrefillChunk, SubBatch, Tier

_WATERMARK = 0.01
"""Share of the blocks that stays free when a prompt is admitted."""


class GpuOnly:
    """First come first served. Plans the next iteration when the last one is over."""

    def __init__(self, capacity: Capacity, chunk_tokens: int) -> None:
        """`chunk_tokens`: what one iteration computes at most, decodes included."""
        self._capacity = capacity
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[Record] = deque()
        self._running: list[Record] = []
        self._records: dict[int, Record] = {}
        self._released: list[int] = []
        self._iteration = 0
        self._is_planned = False
        self._num_added = 0

    def add(self, request: SequenceRequest, now: float) -> int:
        """Raises ValueError for what can never fit."""
        self._num_added += 1
        if self._capacity.blocks_for(len(request.prompt) + request.max_new_tokens) > self._capacity.gpu_blocks:
            raise ValueError(f"request {self._num_added} is larger than the GPU's KV cache")
        record = Record(self._num_added, request)
        self._waiting.append(record)
        self._records[record.sequence_id] = record
        return record.sequence_id

    def plan(self, now: float) -> IterationPlan | None:
        """Decodes, oldest first; then begun prompts; then new ones while a whole prompt fits."""
        if self._is_planned or not self._records:
            return None
        budget = self._chunk_tokens
        decodes = self._decodes()
        budget -= len(decodes)
        chunks = [self._chunk(item, budget) for item in self._running if item.computed < item.to_prefill]
        # One prompt at most is begun and not complete: the next one only starts when a chunk has left budget.
        budget -= sum(chunk.num_tokens for chunk in chunks)
        new: list[NewSequence] = []
        free = self._capacity.gpu_blocks - self.gpu_blocks_used
        while budget > 0 and self._waiting and len(self._running) < self._capacity.max_sequences:
            free -= self._capacity.blocks_for(self._waiting[0].num_tokens)
            if free < (_WATERMARK * self._capacity.gpu_blocks if self._running else 0):
                break
            record = self._waiting.popleft()
            new.append(record.begin(Tier.GPU))
            self._running.append(record)
            chunks.append(self._chunk(record, budget))
            budget -= chunks[-1].num_tokens
        for record in decodes:
            record.computed += 1
        released, self._released = tuple(self._released), []
        self._iteration += 1
        self._is_planned = True
        batch = SubBatch(
            prefills=tuple(chunk for chunk in chunks if chunk.num_tokens),
            gpu_decodes=tuple(record.sequence_id for record in decodes),
        )
        return IterationPlan(
            1, self._iteration, Mode.GPU_ONLY, released=released, new_sequences=tuple(new), sub_batches=(batch,)
        )

    def apply(self, result: IterationResult, now: float) -> Applied:
        self._is_planned = False
        applied, ended = take_tokens(self._records, result)
        for record in ended:
            self._running.remove(record)
            self._released.append(record.sequence_id)
        return applied

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def gpu_blocks_used(self) -> int:
        return sum(self._blocks(item) for item in self._running)

    @property
    def host_blocks_used(self) -> int:
        return 0

    def _blocks(self, record: Record) -> int:
        """That it owns: from its admission those of all it has to prefill."""
        return self._capacity.blocks_for(max(record.to_prefill, record.computed))

    def _decodes(self) -> list[Record]:
        """All that are past their prompt; for want of blocks the newest running ones are given up."""
        used = self.gpu_blocks_used
        decodes: list[Record] = []
        for record in list(self._running):
            if record.computed < record.to_prefill or record not in self._running:
                continue
            grown = self._capacity.blocks_for(record.computed + 1) - self._blocks(record)
            while used + grown > self._capacity.gpu_blocks:
                victim = self._running.pop()
                used -= self._blocks(victim)
                self._waiting.appendleft(victim)
                self._released.append(victim.sequence_id)
                if victim is record:
                    break
            else:
                used += grown
                decodes.append(record)
        return decodes

    @staticmethod
    def _chunk(record: Record, budget: int) -> PrefillChunk:
        """The next part of its prompt; counted as computed."""
        num_tokens = min(budget, record.to_prefill - record.computed)
        chunk = PrefillChunk(record.sequence_id, record.computed, num_tokens)
        record.computed += num_tokens
        return chunk
