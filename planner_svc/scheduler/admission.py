"""Refuses at the door what can never be served, or not now; before a request costs anything."""

from enum import Enum

from planner_svc.scheduler.limits import Capacity, ModePolicy
from planner_svc.scheduler.sequence import SequenceRequest
from svc_common.plan import Tier


class AdmissionReason(Enum):
    """Why a request is refused."""

    QUEUE_FULL = "queue_full"
    """Too many wait; try again later."""
    EXCEEDS_KV = "exceeds_kv"
    """Prompt and answer can never fit either tier."""
    EXCEEDS_CONTEXT = "exceeds_context"
    """Prompt and answer exceed the tokens of one sequence."""
    TOO_SMALL = "too_small"
    """Nothing to prefill, or nothing to generate."""
    TTFT_UNREACHABLE = "ttft_unreachable"
    """With what is ahead of it, its first token would come too late; try again later."""
    TPOT_UNREACHABLE = "tpot_unreachable"
    """Beside what runs, its tokens would follow one another too slowly; try again later."""


class AdmissionError(Exception):
    """A refused request: the field at fault and its limit, in whole units."""

    def __init__(self, reason: AdmissionReason, field: str, limit: int) -> None:
        super().__init__(f"{reason.value}: {field}, limit {limit}")
        self.reason = reason
        self.field = field
        self.limit = limit


class LateError(AdmissionError):
    """A request that by prediction would miss a target."""

    def __init__(self, reason: AdmissionReason, field: str, target_s: float, predicted_s: float) -> None:
        super().__init__(reason, field, 0)
        self.target_s = target_s
        self.predicted_s = predicted_s


def largest_tier_tokens(capacity: Capacity, policy: ModePolicy) -> int:
    """Tokens of KV that a sequence may grow to. With attention on the GPU alone, the host can only park."""
    blocks = capacity.gpu_blocks if policy == "gpu_only" else max(map(capacity.most_blocks, Tier))
    return blocks * capacity.block_tokens


def check(request: SequenceRequest, capacity: Capacity, policy: ModePolicy) -> None:
    """Raises AdmissionError for what can never be served. Limits are in tokens of prompt and answer together.

    The field at fault is the prompt where it alone leaves no room for a token, `max_new_tokens` otherwise.
    """
    if not request.prompt:
        raise AdmissionError(AdmissionReason.TOO_SMALL, "prompt", 1)
    if request.max_new_tokens < 1:
        raise AdmissionError(AdmissionReason.TOO_SMALL, "max_new_tokens", 1)
    total = len(request.prompt) + request.max_new_tokens
    kv_limit = largest_tier_tokens(capacity, policy) + 1  # the last token needs no KV
    for reason, limit in (
        (AdmissionReason.EXCEEDS_CONTEXT, capacity.max_sequence_tokens),
        (AdmissionReason.EXCEEDS_KV, kv_limit),
    ):
        if total > limit:
            raise AdmissionError(reason, "prompt" if len(request.prompt) >= limit else "max_new_tokens", limit)


def fits(request: SequenceRequest, capacity: Capacity, policy: ModePolicy) -> bool:
    """Whether it can be served at all."""
    try:
        check(request, capacity, policy)
    except AdmissionError:
        return False
    return True
