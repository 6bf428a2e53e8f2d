"""What both baselines keep of a sequence, and how they answer results."""

from dataclasses import dataclass

from planner_svc.scheduler import Applied, SequenceRequest, TokenEvent
from svc_common.plan import IterationResult, NewSequence, Tier


@dataclass(slots=True, eq=False)
class Record:
    """A sequence between two iterations."""

    sequence_id: int
    request: SequenceRequest
    num_outputs: int = 0
    computed: int = 0
    """Tokens with KV."""
    to_prefill: int = 0
    """Tokens to compute before the next decode: prompt and, after a preemption, outputs."""

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs: what the next decode attends."""
        return len(self.request.prompt) + self.num_outputs

    @property
    def finished(self) -> bool:
        return self.num_outputs == self.request.max_new_tokens

    def begin(self, tier: Tier) -> NewSequence:
        """As a plan introduces it, to be prefilled whole."""
        self.computed, self.to_prefill = 0, self.num_tokens
        return NewSequence(self.sequence_id, (0,) * self.to_prefill, tier, ())


def take_tokens(records: dict[int, Record], result: IterationResult) -> tuple[Applied, list[Record]]:
    """Counts a result's tokens; also returns the sequences that ended, which are forgotten."""
    events, ended = [], []
    for sequence_id, token_id in result.tokens:
        record = records[sequence_id]
        record.num_outputs += 1
        if record.finished:
            ended.append(records.pop(sequence_id))
        events.append(TokenEvent(sequence_id, token_id, None, "length" if record.finished else None))
    return Applied(tuple(events)), ended
