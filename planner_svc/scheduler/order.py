"""In what order prompts come to be computed: by priority, then by their classes' shares, then by when they are due."""

from collections.abc import Sequence as Items
from collections.abc import Set
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
    bound by its class's share. Of these, those whose tokens had begun to come go first, then by arrival. Of the prompts
    up to the first that would be late, the longest of the lowest priority is put off: that leaves the fewest late ones
    (Moore and Hodgson's rule for one machine).
    """
    aged = {item.sequence_id for item in prompts if is_aged_prompt(item, start_s)}

    def place(sequence: Sequence) -> tuple[bool, float, int]:
        is_aged = sequence.sequence_id in aged
        return not is_aged, not sequence.outputs if is_aged else sequence.due_s, sequence.sequence_id

    ordered = sorted(prompts, key=place)
    if shares.is_single:
        put_off = _put_off(ordered, aged, start_s, prefill_tokens_per_s)
        return sorted(ordered, key=lambda item: item.sequence_id in put_off)
    highest = max((_priority(item) for item in prompts), default=0)
    turns = shares.turns((item, num_left(item)) for item in ordered)

    def level(sequence: Sequence) -> int:
        return highest if sequence.sequence_id in aged else _priority(sequence)

    ordered.sort(key=lambda item: (-level(item), turns[item.sequence_id]))
    put_off = _put_off(ordered, aged, start_s, prefill_tokens_per_s)
    return sorted(ordered, key=lambda item: (-level(item), item.sequence_id in put_off))


def _put_off(ordered: Items[Sequence], aged: Set[int], start_s: float, prefill_tokens_per_s: float) -> set[int]:
    """Those that can't be in time, or that would make others late."""
    kept: list[tuple[int, int, int]] = []
    put_off: set[int] = set()
    finish_s = start_s
    for sequence in ordered:
        if not bounds(sequence) or sequence.sequence_id in aged:
            continue
        num_tokens = num_left(sequence)
        if start_s + num_tokens / prefill_tokens_per_s > sequence.due_s:
            put_off.add(sequence.sequence_id)
            continue
        heappush(kept, (_priority(sequence), -num_tokens, sequence.sequence_id))
        finish_s += num_tokens / prefill_tokens_per_s
        if finish_s > sequence.due_s:
            _, longest, sequence_id = heappop(kept)
            finish_s += longest / prefill_tokens_per_s
            put_off.add(sequence_id)
    return put_off


def _priority(sequence: Sequence) -> int:
    return sequence.request.service_class.priority
