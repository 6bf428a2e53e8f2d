"""When tokens are due, and who is in a hurry; the only place that knows what targets mean."""

from planner_svc.scheduler.sequence import Sequence

MAX_PASSED_OVER = 8
"""Plans in a row in which a sequence may be passed over; then it runs whatever that costs."""
MAX_LATE_PASSED_OVER = 64
"""The same for one whose targets are lost already: others can still be helped."""
BATCH_TTFT_S = 60.0
"""A request without targets takes its place among others as if its first token were due then."""
AGED_TTFTS = 20
"""A prompt that has waited this many times its target comes before all others."""
_LEAST_TTFT_S = 1.0
"""Taken for less than that there, where the class has no target: nobody overtakes by asking for the impossible."""


def arrive(sequence: Sequence, now: float) -> None:
    """Its first token becomes due."""
    targets = sequence.request.targets
    sequence.arrival_s = now
    sequence.due_s = now + (targets.ttft_s if targets else BATCH_TTFT_S)


def schedule_token(sequence: Sequence, end_s: float) -> None:
    """Its next token is to come at `end_s`; the one after it becomes due."""
    targets = sequence.request.targets
    if targets is None:
        return
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


def is_aged_prompt(sequence: Sequence, now: float) -> bool:
    """Whether it has waited for too long. A target below its class's makes it no less patient."""
    own, of_class = sequence.request.targets, sequence.request.service_class.targets
    ttft_s = max(own.ttft_s, of_class.ttft_s if of_class else _LEAST_TTFT_S) if own else BATCH_TTFT_S
    return now - sequence.arrival_s > AGED_TTFTS * ttft_s


def bounds(sequence: Sequence) -> bool:
    """Whether an iteration must end before its next token is due."""
    return sequence.request.targets is not None and not sequence.is_late
