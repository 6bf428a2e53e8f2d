"""Whether a request would come in time, told when it arrives: what its class may be refused by.

    first token = tokens ahead / rate of prefill  +  tokens ahead beyond the free room / rate at which room comes free

The first rate is the estimator's; the second is measured: prompt tokens a second that were let in while others had to
wait, or of requests that ended, whichever is more. What this leaves out, a factor learns from outcomes: it rises with
each request that was let in and came too late, and falls with each that came in time, so that about one of
`_IN_TIME_PER_LATE` is late.
"""

from collections import deque
from collections.abc import Iterable

from planner_svc.estimator import Calibration, IterationLoad, SubBatchLoad
from planner_svc.scheduler.admission import AdmissionReason, LateError
from planner_svc.scheduler.costs import Costs
from planner_svc.scheduler.limits import Capacity
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence, SequenceRequest, State
from planner_svc.scheduler.waiting import ClassLanes, WaitingQueue
from svc_common.plan import Mode, Tier

_NUM_MARKS = 32
"""Admissions, and ends, over which a rate is measured."""
_IN_TIME_PER_LATE = 40
"""So many in time lower the factor by what one late one raises it."""
_STEP = 1.25
"""Of the factor, for each late one."""
_LOWEST, _HIGHEST = 0.2, 4.0
"""Of the factor."""
_LEAST_SHARE = 0.1
"""Of the executor, that prompts have beside decodes."""


class Flow:
    """Tokens per second of counted time, over the last so many times that any came."""

    def __init__(self) -> None:
        self._counted_s = 0.0
        self._since_s: float | None = None
        """Up to when the time is counted; None while none is."""
        self._num_tokens = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=_NUM_MARKS)

    @property
    def is_counting(self) -> bool:
        return self._since_s is not None

    def advance_to(self, now: float, counts_on: bool) -> None:
        """Whether the time from here on counts."""
        self._counted_s = self._counted_by(now)
        self._since_s = now if counts_on else None

    def add(self, num_tokens: int) -> None:
        """They came by the time that was advanced to."""
        self._num_tokens += num_tokens
        self._marks.append((self._counted_s, self._num_tokens))

    def tokens_per_s(self, now: float) -> float:
        """0 where too little is known."""
        if len(self._marks) < 2:
            return 0.0
        first_s, first_tokens = self._marks[0]
        counted_s = self._counted_by(now) - first_s
        return (self._num_tokens - first_tokens) / counted_s if counted_s > 0 else 0.0

    def _counted_by(self, now: float) -> float:
        return self._counted_s + (max(0.0, now - self._since_s) if self._since_s is not None else 0.0)


class Forecast:
    """Of one epoch."""

    def __init__(
        self,
        capacity: Capacity,
        calibration: Calibration,
        costs: Costs,
        residency: Residency,
        queue: WaitingQueue,
    ) -> None:
        self._capacity = capacity
        self._calibration = calibration
        self._costs = costs
        self._residency = residency
        self._queue = queue
        self._inflow = Flow()
        """Prompts let in while others had to wait."""
        self._outflow = Flow()
        """Prompts of those that ended, while any ran: each leaves room for another."""
        self._factor = 1.0
        self._overdue: set[int] = set()
        """Known to be late before their first token came."""

    def note_plan(self, num_admitted_tokens: int, now: float) -> None:
        """A plan was made that lets in prompts of so many tokens."""
        was_crowded = self._inflow.is_counting
        self._inflow.advance_to(now, counts_on=len(self._queue) > 0)
        self._outflow.advance_to(now, counts_on=bool(self._residency.sequences))
        if was_crowded and num_admitted_tokens:
            self._inflow.add(num_admitted_tokens)

    def note_overdue(self, sequences: Iterable[Sequence]) -> None:
        """Their first token did not come in time. It may be long until it does, and whoever comes now needs to know."""
        for sequence in sequences:
            if _was_foretold(sequence):
                self._overdue.add(sequence.sequence_id)
                self._learn(is_late=True)

    def note_first_token(self, sequence: Sequence) -> None:
        """It came, in time or not."""
        if _was_foretold(sequence) and sequence.sequence_id not in self._overdue:
            self._learn(sequence.is_late)

    def note_last_token(self, sequence: Sequence, now: float) -> None:
        """It came; whether all came in time is known."""
        is_known = sequence.is_late or sequence.sequence_id in self._overdue
        if _was_foretold(sequence) and not is_known and came_late(sequence, now):
            self._learn(is_late=True)

    def note_end(self, sequence: Sequence) -> None:
        """It ended, however."""
        self._overdue.discard(sequence.sequence_id)
        if sequence.state is not State.WAITING:
            self._outflow.add(len(sequence.request.prompt))

    def _learn(self, is_late: bool) -> None:
        step = _STEP if is_late else _STEP ** (-1 / _IN_TIME_PER_LATE)
        self._factor = min(_HIGHEST, max(_LOWEST, self._factor * step))

    def check(self, request: SequenceRequest, start_s: float, now: float) -> None:
        """Raises LateError for what would come too late. An idle executor refuses nothing.

        `start_s`: when the next plan begins to run. Takes no longer the more wait or run.
        """
        targets = request.targets
        if targets is None or not request.service_class.refuses_late or self._is_idle():
            return
        decode_s = self._decode_s()
        if decode_s > targets.tpot_s:
            raise LateError(AdmissionReason.TPOT_UNREACHABLE, "tpot", targets.tpot_s, decode_s)
        first_s = start_s - now + self._factor * self._first_token_s(request, now, decode_s / targets.tpot_s)
        if first_s > targets.ttft_s:
            raise LateError(AdmissionReason.TTFT_UNREACHABLE, "ttft", targets.ttft_s, first_s)

    def _is_idle(self) -> bool:
        return not (self._residency.sequences or len(self._queue))

    def _decode_s(self) -> float:
        """One token of each sequence on the GPU and of a new one, their contexts taken for whole blocks."""
        num_decodes = self._residency.num_on(Tier.GPU) + 1
        context = self._residency.used(Tier.GPU) * self._capacity.block_tokens
        load = SubBatchLoad(num_gpu_decodes=num_decodes, gpu_context_tokens=context, num_outputs=num_decodes)
        return self._calibration.estimator.iteration_s(IterationLoad(load)) * self._calibration.factor(Mode.GPU_ONLY)

    def _first_token_s(self, request: SequenceRequest, now: float, decode_share: float) -> float:
        num_begun = self._residency.num_tokens_to_prefill
        num_waiting = self._num_ahead(request, now) + len(request.prompt)
        share = max(_LEAST_SHARE, 1 - decode_share)
        prefill_s = (num_begun + num_waiting) / (self._costs.prefill_tokens_per_s * share)
        num_roomless = num_waiting - max(0, self._residency.free(Tier.GPU)) * self._capacity.block_tokens
        rate = max(self._inflow.tokens_per_s(now), self._outflow.tokens_per_s(now))
        room_s = num_roomless / rate if num_roomless > 0 and rate else 0.0
        return prefill_s + room_s

    def _num_ahead(self, request: SequenceRequest, now: float) -> int:
        """Tokens of waiting prompts that would come before it."""
        own, targets = request.service_class, request.targets
        assert targets is not None
        due_s = now + targets.ttft_s
        num_own, above, beside = 0, self._queue.num_returned_tokens, list[ClassLanes]()
        for lanes in self._queue.classes:
            if lanes.service_class.name == own.name:
                num_own = lanes.tokens.before(due_s)
            elif lanes.service_class.priority > own.priority:
                above += lanes.tokens.total + lanes.num_late_tokens
            elif lanes.service_class.priority == own.priority:
                beside.append(lanes)
        # Another class of this priority gets its share of the time in which the own ones are computed, and no more.
        num_computed = num_own + len(request.prompt)
        shared = sum(
            min(lanes.tokens.total + lanes.num_late_tokens, round(num_computed * lanes.service_class.share / own.share))
            for lanes in beside
        )
        return num_own + above + shared


def _was_foretold(sequence: Sequence) -> bool:
    return sequence.request.service_class.refuses_late and sequence.request.targets is not None


def came_late(sequence: Sequence, now: float) -> bool:
    """Whether its tokens after the first, the last of which comes at `now`, took too long on average."""
    targets, first_s = sequence.request.targets, sequence.first_token_s
    if targets is None or first_s is None:
        return False
    return now - first_s > targets.tpot_s * (len(sequence.outputs) - 1)
