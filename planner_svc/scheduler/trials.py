"""What losses of the executor mean for a sequence that it was computing: it runs again, is tried alone, or ends.

A sequence that brings the executor down does so again when it is computed again, and whatever runs beside it is lost
with it. After two losses without a token in between a sequence is a suspect: suspects are then tried one at a time,
each until it has got a token, while all others wait, those that have passed among them. So the next loss has one
culprit, and the others go on.
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum

from planner_svc.scheduler.sequence import Sequence, State

MAX_LOSSES_IN_A_ROW = 3
"""Without a token in between: the last of them on trial."""
MAX_LOSSES = 10
"""In all: what brings the executor down may be no single sequence, and is not to do so for ever."""


class Verdict(Enum):
    """Why a sequence is not computed again."""

    BREAKS_EXECUTOR = "breaks_executor"
    LOST_TOO_OFTEN = "lost_too_often"


def note_loss(sequence: Sequence, is_certain: bool) -> Verdict | None:
    """The executor was lost while it computed this one. Not certain: something else may have brought it down."""
    num_before = sequence.num_losses_in_a_row if _is_fruitless(sequence) else 0
    most = MAX_LOSSES_IN_A_ROW - (not is_certain)
    sequence.num_losses_in_a_row = min(num_before + 1, most)
    sequence.num_outputs_at_loss = len(sequence.outputs)
    sequence.num_losses += 1
    if sequence.num_losses_in_a_row == MAX_LOSSES_IN_A_ROW:
        return Verdict.BREAKS_EXECUTOR
    return Verdict.LOST_TOO_OFTEN if sequence.num_losses >= MAX_LOSSES else None


def _is_fruitless(sequence: Sequence) -> bool:
    """Whether no token came since it was lost."""
    return len(sequence.outputs) == sequence.num_outputs_at_loss


def _is_suspect(sequence: Sequence) -> bool:
    return sequence.num_losses_in_a_row >= MAX_LOSSES_IN_A_ROW - 1 and _is_fruitless(sequence)


class Trials:
    """Of one epoch: who may join the queue, and when."""

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        """`sequences`: all that wait, by arrival."""
        self._suspects: deque[Sequence] = deque()
        self._others: dict[int, Sequence] = {}
        for sequence in sequences:
            if _is_suspect(sequence):
                self._suspects.append(sequence)
            else:
                self._others[sequence.sequence_id] = sequence
        self._on_trial: Sequence | None = None

    def __len__(self) -> int:
        """Sequences that may not join the queue yet."""
        return len(self._suspects) + len(self._others)

    def num_of(self, class_name: str) -> int:
        """The same of one service class."""
        waiting = (*self._suspects, *self._others.values())
        return sum(sequence.request.service_class.name == class_name for sequence in waiting)

    @property
    def are_on(self) -> bool:
        return self._on_trial is not None

    @property
    def is_over(self) -> bool:
        """Whether the one on trial has got a token, or has ended."""
        tried = self._on_trial
        return tried is not None and (tried.state is State.FINISHED or not _is_fruitless(tried))

    @property
    def passed(self) -> Sequence | None:
        """The one that has to wait for those still to be tried."""
        return self._on_trial if self._suspects else None

    def release(self) -> list[Sequence]:
        """Who may join the queue now: the next suspect or, after the last, all others by arrival."""
        if self._suspects:
            self._on_trial = self._suspects.popleft()
            return [self._on_trial]
        self._on_trial = None
        others, self._others = self._others, {}
        return sorted(others.values(), key=lambda sequence: sequence.sequence_id)

    def hold(self, sequence: Sequence) -> None:
        """It waits while trials are on."""
        self._others[sequence.sequence_id] = sequence

    def drop(self, sequence: Sequence) -> bool:
        """It has ended; whether it was waiting here."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
            return True
        return self._others.pop(sequence.sequence_id, None) is not None
