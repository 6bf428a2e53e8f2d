"""In what order prompts come to be computed: by priority, then by their classes' shares, then by when they are due."""

from collections.abc import Sequence as Items
from heapq import heappop, heappush

from planner_svc.scheduler.sequence import Sequence, State
from planner_svc.scheduler.shares import Shares
from planner_svc.scheduler.urgency import bounds, is_aged_prompt


def num_to_prefill(sequence: Sequence) -> int:
    """Of the current stay, or of the one that would begin."""
    return sequence.num_tokens if sequence.state is State.WAITING else sequence.num_prefill_tokens


def num_prefilled(sequence: Sequence) -> int:
    return 0 if sequence.state is State.WAITING else sequence.num_computed_tokens


def num_left(sequence: Sequence) -> int:
    return num_to_prefill(sequence) - num_prefilled(sequence)


def in_order(prompts: Items[Sequence], start_s: float, prefill_tokens_per_s: float, shares: Shares) -> list[Sequence]:
    """By level and turn; those of a level that cannot come in time, and would make others late, after its others.

    A prompt's level is its class's priority; one that has waited too long is on the highest level that waits, and there
    bound by its class's share. Of the prompts up to the first that would be late, the longest of the lowest priority is
    put off: that leaves the fewest late ones (Moore and Hodgson's rule for one machine).
    """
    levels = _levels(prompts, start_s)
    ordered = _by_turn(prompts, start_s, levels, shares)
    kept: list[tuple[int, int, int]] = []
    put_off: set[int] = set()
    finish_s = start_s
    for sequence in ordered:
        if not bounds(sequence) or is_aged_prompt(sequence, start_s):
            continue
        num_tokens = num_left(sequence)
        if start_s + num_tokens / prefill_tokens_per_s > sequence.due_s:
            put_off.add(sequence.sequence_id)
            continue
        heappush(kept, (levels[sequence.sequence_id], -num_tokens, sequence.sequence_id))
        finish_s += num_tokens / prefill_tokens_per_s
        if finish_s > sequence.due_s:
            _, longest, sequence_id = heappop(kept)
            finish_s += longest / prefill_tokens_per_s
            put_off.add(sequence_id)
    return sorted(ordered, key=lambda item: (-levels[item.sequence_id], item.sequence_id in put_off))


def _levels(prompts: Items[Sequence], start_s: float) -> dict[int, int]:
    highest = max((item.request.service_class.priority for item in prompts), default=0)
    return {
        item.sequence_id: highest if is_aged_prompt(item, start_s) else item.request.service_class.priority
        for item in prompts
    }


def _by_turn(prompts: Items[Sequence], start_s: float, levels: dict[int, int], shares: Shares) -> list[Sequence]:
    ordered = sorted(prompts, key=lambda item: (not is_aged_prompt(item, start_s), item.due_s, item.sequence_id))
    if shares.is_single:
        return ordered
    turns = shares.turns((item, num_left(item)) for item in ordered)
    return sorted(ordered, key=lambda item: (-levels[item.sequence_id], turns[item.sequence_id]))
