"""Shares CPU decodes between the sub-batches and holds prompts back, so that neither processor waits for the other.

NEO (MLSys 2025), section 4: attention on the CPU is hidden while cpu1 <= lin0 + pre0 and cpu0 <= lin1 + gdec0.
"""

from planner_svc.estimator import Estimator
from planner_svc.scheduler.batch import Batch, Chunk, context_tokens
from planner_svc.scheduler.sequence import Sequence
from svc_common.plan import Tier

MAX_PASSED_OVER = 8
"""Plans in a row in which balance may pass a sequence over; then it runs whatever that costs."""


def is_aged(sequence: Sequence) -> bool:
    return sequence.num_passed_over >= MAX_PASSED_OVER


class Balance:
    """Per-layer times of a batch that is being filled. Index 0 and 1: first and second sub-batch."""

    def __init__(self, estimator: Estimator, batch: Batch) -> None:
        self._estimator = estimator
        self._batch = batch
        self._num_tokens = [sum(chunk.num_tokens for chunk in batch.chunks) + len(batch.gpu_decodes), 0]
        self._prefill_s = sum(estimator.prefill_s(chunk.num_tokens, chunk.start) for chunk in batch.chunks)
        self._gpu_decode_s = estimator.gpu_decode_s(len(batch.gpu_decodes), context_tokens(batch.gpu_decodes))
        self._linear_s = [estimator.linear_s(num_tokens) for num_tokens in self._num_tokens]
        self._cpu_context_tokens = [0, 0]
        self._cpu_s = [0.0, 0.0]

    def _hidden_s(self, index: int) -> float:
        """GPU work beside the CPU attention of a sub-batch: that of the other's layer, but its own attention."""
        return self._linear_s[0] + self._prefill_s if index == 1 else self._linear_s[1] + self._gpu_decode_s

    def place_cpu_decodes(self, candidates: list[Sequence], waive: bool) -> None:
        """Puts each into the sub-batch with more slack; skips those that would break its constraint.

        `waive` places them all, still balanced; aged ones are placed in any case, before the others.
        """
        shortest_refused = float("inf")  # a longer one would be refused as well: saves most of the estimates
        for sequence in sorted(candidates, key=lambda item: (not is_aged(item), item.sequence_id)):
            must_run = waive or is_aged(sequence)
            context = sequence.num_computed_tokens + 1
            if context >= shortest_refused and not must_run:
                continue
            slack = [self._hidden_s(index) - self._cpu_s[index] for index in (0, 1)]
            index = 1 if slack[1] > slack[0] else 0
            decodes = self._batch.cpu_decodes[index]
            cpu_s = self._estimator.cpu_decode_s(len(decodes) + 1, self._cpu_context_tokens[index] + context)
            if cpu_s > self._hidden_s(index) and not must_run:
                shortest_refused = context
                continue
            decodes.append(sequence)
            self._cpu_context_tokens[index] += context
            self._cpu_s[index] = cpu_s
            self._num_tokens[index] += 1
            self._linear_s[index] = self._estimator.linear_s(self._num_tokens[index])

    def hold_back_host_prompts(self, residents: list[Sequence]) -> list[Sequence]:
        """Takes admissions to the host out of the batch, last first, while the CPU's attention stays hidden.

        NEO's rule: such a prompt is worth its time now only where it helps to hide the CPU. It is also let in while
        the CPU could still hide its decodes, since an idle CPU is what it comes for; when it has waited too long; and
        when there is nothing else to run. Returns those held back.
        """
        batch, held_back = self._batch, []
        num_welcome = self._num_welcome([item for item in residents if item.tier is Tier.HOST])
        admissions = [chunk for chunk in batch.chunks if chunk.is_admission and chunk.tier is Tier.HOST]
        # They are the tail of the batch: once one prompt goes to the host, all later ones of the plan do.
        for chunk in reversed(admissions[num_welcome:]):
            is_only_work = len(batch.chunks) == 1 and not batch.decodes()
            if is_aged(chunk.sequence) or is_only_work or not self._hides_without(chunk):
                break
            self._remove_last(chunk)
            held_back.append(chunk.sequence)
        return held_back

    def _num_welcome(self, on_host: list[Sequence]) -> int:
        """How many admissions to the host the CPU has time for, once they and all on the host decode."""
        batch = self._batch
        first, second = (len(decodes) for decodes in batch.cpu_decodes)
        decode_iteration_s = (
            self._estimator.linear_s(len(batch.gpu_decodes) + first)
            + self._estimator.linear_s(max(1, second))
            + self._gpu_decode_s
        )
        num_sequences = len(on_host)
        num_tokens = sum(max(item.num_computed_tokens, item.num_prefill_tokens) for item in on_host)
        num_welcome = 0
        for chunk in batch.chunks:
            if chunk.is_admission and chunk.tier is Tier.HOST:
                num_sequences += 1
                num_tokens += chunk.total_tokens
                if self._estimator.cpu_decode_s(num_sequences, num_tokens) > decode_iteration_s:
                    break
                num_welcome += 1
        return num_welcome

    def _hides_without(self, chunk: Chunk) -> bool:
        linear_s = self._estimator.linear_s(self._num_tokens[0] - chunk.num_tokens)
        prefill_s = self._prefill_s - self._estimator.prefill_s(chunk.num_tokens, chunk.start)
        return self._cpu_s[1] <= linear_s + prefill_s

    def _remove_last(self, chunk: Chunk) -> None:
        self._batch.chunks.pop()
        self._num_tokens[0] -= chunk.num_tokens
        self._linear_s[0] = self._estimator.linear_s(self._num_tokens[0])
        self._prefill_s -= self._estimator.prefill_s(chunk.num_tokens, chunk.start)
