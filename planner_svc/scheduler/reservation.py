"""Makes what was decided binding: its blocks are given and its work counts as done."""

from dataclasses import dataclass

from planner_svc.scheduler.batch import Batch, Chunk
from planner_svc.scheduler.events import Tally
from planner_svc.scheduler.placement import Placement
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence
from planner_svc.scheduler.urgency import schedule_tokens
from planner_svc.scheduler.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Reservation:
    """Lives as long as an epoch."""

    residency: Residency
    placement: Placement
    queue: WaitingQueue
    tally: Tally

    def take(self, batch: Batch, end_s: float) -> tuple[int, ...]:
        """Of one plan, which is to end at `end_s`. Returns the sequences that get a token, in the result's order."""
        chunks = [*batch.chunks[0], *batch.chunks[1]]
        self._claim_prefixes(chunks)
        self._give_host_blocks(batch)
        self._advance_prompts(chunks)
        for sequence in batch.decodes():
            sequence.num_computed_tokens = num_computed = sequence.num_computed_tokens + 1
            if num_computed > sequence.num_once_computed_tokens:
                sequence.num_once_computed_tokens = num_computed
            sequence.num_passed_over = 0
        with_output = batch.sequences_with_output()
        for sequence in with_output:
            sequence.num_in_flight += 1
            if sequence.num_unscheduled == 0:
                self.placement.note_spent(sequence)
        schedule_tokens(with_output, end_s)
        return tuple([sequence.sequence_id for sequence in with_output])

    def _claim_prefixes(self, chunks: list[Chunk]) -> None:
        """Before any block is handed out: those that are shared may have no owner that keeps them."""
        claimed: set[int] = set()
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.is_admission and sequence.sequence_id not in claimed:
                claimed.add(sequence.sequence_id)
                self.residency.claim_prefix(sequence, chunk.tier, chunk.pool, chunk.start)

    def _give_host_blocks(self, batch: Batch) -> None:
        """Those promised to decodes that run; a cohort gets them when its step begins."""
        residency = self.residency
        residency.redeem_promises()
        host_decodes: list[Sequence] = [*batch.cpu_decodes[0], *batch.cpu_decodes[1]]
        if batch.cohort and batch.cohort.start_layer == 0:
            host_decodes += batch.cohort.sequences
        for sequence in host_decodes:
            if residency.lacks_block(sequence):
                residency.grow(sequence)

    def _advance_prompts(self, chunks: list[Chunk]) -> None:
        prefilled = recomputed = cached = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.is_admission:
                self.queue.remove(sequence)
                self.residency.admit(sequence, chunk.tier, chunk.pool)
                cached += chunk.start
                if not sequence.num_once_computed_tokens:
                    sequence.num_cached_tokens = chunk.start
            end = chunk.start + chunk.num_tokens
            num_again = max(0, min(end, sequence.num_once_computed_tokens) - chunk.start)
            recomputed += num_again
            prefilled += chunk.num_tokens - num_again
            sequence.advance_to(end)
        for chunk in chunks:  # Those admitted here found what earlier plans have computed.
            self.residency.note_prefix(chunk.sequence)
        if chunks:
            self.tally.add(prefilled_tokens=prefilled, recomputed_tokens=recomputed, cached_tokens=cached)
