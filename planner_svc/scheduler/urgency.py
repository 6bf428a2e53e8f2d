"""When tokens are due, and who is in a hurry; the only place that knows what targets mean."""

from collections.abc import Iterable
from operator import attrgetter

from planner_svc.scheduler.sequence import Sequence

MAX_PASSED_OVER = 8
"""Plans in a row in which a sequence may be passed over; then it runs whatever that costs."""
MAX_LATE_PASSED_OVER = 64
"""The same for one whose targets are lost already: others can still be helped."""
BATCH_TTFT_S = 60.0
"""A request without targets takes its place among others as if its first token were due then."""
AGED_TTFTS = 20
"""A prompt that has waited this many times its target comes before all others."""
INTERRUPTED_TTFTS = 5
"""The same for one whose tokens had begun to come and that must be computed again, counted from its next token."""
_LEAST_TTFT_S = 1.0
"""Taken for less than that there, where the class has no target: nobody overtakes by asking for the impossible."""

_hurry = attrgetter("is_late", "due_s")


def arrive(sequence: Sequence, now: float) -> None:
    """Its first token becomes due."""
    targets = sequence.request.targets
    sequence.arrival_s = now
    sequence.due_s = now + (targets.ttft_s if targets else BATCH_TTFT_S)


def schedule_tokens(sequences: Iterable[Sequence], end_s: float) -> None:
    """The next token of each is to come at `end_s`; the one after it becomes due."""
    for sequence in sequences:
        targets = sequence.request.targets
        if targets is None:
            continue
        if sequence.first_token_s is None:
            sequence.first_token_s = end_s
            sequence.due_s = end_s + targets.tpot_s
        else:
            sequence.due_s += targets.tpot_s


def take_first_token(sequence: Sequence, now: float) -> None:
    """The first token came at `now`, which may not be what was expected."""
    targets = sequence.request.targets
    if targets is None or sequence.first_token_s is None:
        return
    sequence.due_s += now - sequence.first_token_s
    sequence.first_token_s = now
    sequence.is_late = now - sequence.arrival_s > targets.ttft_s


def is_aged(sequence: Sequence) -> bool:
    """Whether it has been passed over for too long."""
    return sequence.num_passed_over >= (MAX_LATE_PASSED_OVER if sequence.is_late else MAX_PASSED_OVER)


def order_decodes(sequences: list[Sequence]) -> None:
    """Sorts them, given by arrival: those passed over for too long, then by when they are due, then the late ones."""
    sequences.sort(key=_hurry)
    if any(is_aged(sequence) for sequence in sequences if sequence.num_passed_over):
        sequences.sort(key=lambda sequence: not is_aged(sequence))


def is_aged_prompt(sequence: Sequence, now: float) -> bool:
    """Whether it has waited for too long. A target below its class's makes it no less patient."""
    own, of_class = sequence.request.targets, sequence.request.service_class.targets
    ttft_s = max(own.ttft_s, of_class.ttft_s if of_class else _LEAST_TTFT_S) if own else BATCH_TTFT_S
    if sequence.outputs and now - sequence.due_s > INTERRUPTED_TTFTS * ttft_s:
        return True
    return now - sequence.arrival_s > AGED_TTFTS * ttft_s


def bounds(sequence: Sequence) -> bool:
    """Whether an iteration must end before its next token is due."""
    return sequence.request.targets is not None and not sequence.is_late
