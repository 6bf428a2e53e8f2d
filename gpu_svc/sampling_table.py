"""How the next token of each sequence is drawn, by slot: parameters, what its answer has used, its grammar."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.grammar_states import GrammarStates
from gpu_svc.grammars import Grammars
from gpu_svc.limits import InvalidPlanError
from gpu_svc.logit_changes import LogitChanges
from gpu_svc.sampling import Change, SamplingRows
from svc_common.plan import NewSequence


class SamplingTable:
    """Rows of arrays are valid for the slots of known sequences."""

    def __init__(self, num_slots: int, vocab_size: int, grammars: Grammars | None) -> None:
        """Without `grammars` no sequence may have one."""
        self._vocab_size = vocab_size
        self._columns = SamplingRows(
            temperature=np.zeros(num_slots, np.float32),
            top_k=np.zeros(num_slots, np.int32),
            top_p=np.ones(num_slots, np.float32),
            min_p=np.zeros(num_slots, np.float32),
            seed=np.zeros(num_slots, np.uint64),
            draw=np.zeros(num_slots, np.int64),
            num_logprobs=np.full(num_slots, -1, np.int32),
        )
        self.num_prompt_logprobs = np.full(num_slots, -1, np.int32)
        """[num_slots]: as Sampling.num_prompt_logprobs."""
        self._logit_changes = LogitChanges(num_slots)
        self._states = GrammarStates(num_slots, vocab_size, grammars) if grammars and grammars.end_token_ids else None

    def insert(self, slot: int, new: NewSequence, token_ids: NDArray[np.int32]) -> None:
        """Raises InvalidPlanError. `token_ids` [n] are the sequence's."""
        sampling = new.sampling
        if not all(0 <= token_id < self._vocab_size for token_id, _ in sampling.logit_bias):
            raise InvalidPlanError(f"sequence {new.sequence_id} has a bias for a token outside the vocabulary")
        if not sampling.repetition_penalty > 0:
            raise InvalidPlanError(f"sequence {new.sequence_id} has no repetition penalty above 0")
        if sampling.grammar and self._states is None:
            raise InvalidPlanError(f"sequence {new.sequence_id} has a grammar, and none can be kept to here")
        columns = self._columns
        columns.temperature[slot] = sampling.temperature
        columns.top_k[slot] = sampling.top_k
        columns.top_p[slot] = sampling.top_p
        columns.min_p[slot] = sampling.min_p
        columns.seed[slot] = sampling.seed
        columns.draw[slot] = new.num_generated_tokens
        columns.num_logprobs[slot] = sampling.num_logprobs
        self.num_prompt_logprobs[slot] = sampling.num_prompt_logprobs
        self._logit_changes.insert(slot, sampling, token_ids, new.num_generated_tokens)
        if self._states and sampling.grammar:
            self._states.insert(slot, sampling.grammar, token_ids[len(token_ids) - new.num_generated_tokens :])

    def release(self, slot: int) -> None:
        """Forgets the sequence in a slot."""
        self._logit_changes.release(slot)
        if self._states:
            self._states.release(slot)

    def rows(self, slots: NDArray[np.int64]) -> SamplingRows:
        """How the next token of each of these sequences is drawn."""
        return SamplingRows(*(getattr(self._columns, name)[slots] for name in SamplingRows.__dataclass_fields__))

    def changes(self, slots: NDArray[np.int64]) -> Sequence[Change]:
        """What happens to the logits of these sequences before, in this order. Waits for masks under way."""
        changes = []
        if len(rows := self._logit_changes.rows(slots)):

            def penalize(logits: Tensor) -> None:
                self._logit_changes.apply_(logits, slots)

            changes.append(Change(rows, penalize))
        if self._states and len(rows := self._states.rows(slots)):
            changes.append(Change(rows, self._states.mask(slots[rows], rows)))
        return changes

    def failures(self, slots: NDArray[np.int64]) -> dict[int, str]:
        """Why sequences can't go on in their grammar, by slot; after `changes`."""
        return self._states.failures(slots) if self._states else {}

    def take_tokens(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Counts one more token of each answer; slots and tokens [n]."""
        self._columns.draw[slots] += 1
        self._logit_changes.take_tokens(slots, tokens)
        if self._states:
            self._states.take_tokens(slots, tokens)
