"""The requests being served: from the door into the scheduler, and what becomes of them in each epoch.

No I/O: ExecutorLoop moves plans and results, the servicer moves messages, InHand brings tokens to callers. All methods
run on the event loop's thread.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import zip_longest

from planner_svc import refusals
from planner_svc.availability import Availability
from planner_svc.classes import ServiceClasses
from planner_svc.counters import ClassTallies, Counters, Load
from planner_svc.estimator import Estimator, Factors
from planner_svc.generation import Generation, GenerationRequest
from planner_svc.in_hand import InHand
from planner_svc.request_meters import RequestMeters
from planner_svc.request_span import RequestSpan
from planner_svc.scheduler import (
    AdmissionError,
    AdmissionReason,
    Capacity,
    Demand,
    History,
    LateError,
    ModePolicy,
    Scheduler,
    Sequence,
    SequenceRequest,
    TokenEvent,
)
from planner_svc.scheduler import Counters as SchedulerCounters
from planner_svc.scheduler.admission import fits, largest_tier_tokens
from svc_common.errors import ServiceError, already_exists, invalid_argument, unavailable
from svc_common.model.tokenizer import Tokenizer
from svc_common.plan import IterationPlan, IterationResult

_RETRY_S = 1.0
"""When to come back where nothing better is known."""

logger = logging.getLogger(__name__)


class Engine:
    """Every accepted request ends exactly once: finished, failed, or withdrawn because its caller has gone."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        mode: ModePolicy,
        max_waiting: int,
        classes: ServiceClasses,
        meters: RequestMeters,
        stalled_after_s: float = 30.0,
    ) -> None:
        """`stalled_after_s`: longer than any iteration plausibly takes."""
        self._tokenizer = tokenizer
        self._stalled_after_s = stalled_after_s
        self._mode = mode
        self._max_waiting = max_waiting
        self._scheduler: Scheduler | None = None
        self._capacity: Capacity | None = None
        self._whole_pools: tuple[int, ...] = ()
        """Blocks of the host pools, of one that is not attached now as many as it had: that is a passing state."""
        self.availability = Availability()
        self._histories: dict[int, History] = {}
        """Of sequences that have ended in the scheduler while their last tokens are still to be delivered."""
        self._last_progress_s = 0.0
        self.last_plan: IterationPlan | None = None
        self.last_result: IterationResult | None = None
        self.counters = Counters()
        self.classes = ClassTallies(classes.by_name)
        self.in_hand = InHand(meters, self.classes, self.counters, self._release)
        self.wake = asyncio.Event()
        """Set when there may be something to plan."""
        self.changed = asyncio.Event()
        """Set when readiness may have changed other than by time."""

    # --- what callers ask

    def check_open(self, request_id: str) -> None:
        """Raises ServiceError where a request with this id would be refused now, whatever it holds."""
        self.availability.check()
        assert self._scheduler is not None
        if request_id in self.in_hand:
            raise already_exists("REQUEST_ID_IN_USE", f"request {request_id!r} is running")
        if self._scheduler.num_waiting >= self._max_waiting:
            raise refusals.queue_full(self._max_waiting, self.in_hand.place_free_s)

    def submit(self, request: GenerationRequest, prompt_field: str) -> Generation:
        """Accepts a request. Raises ServiceError; `prompt_field` is what to name where the prompt is too long."""
        self.check_open(request.request_id)
        assert self._scheduler is not None
        sequence = SequenceRequest(
            request.prompt,
            request.max_tokens,
            request.sampling,
            request.end_token_ids,
            request.targets,
            request.service_class,
            request.cache_salt,
        )
        try:
            # Its targets count from the call, not from when the prompt was tokenized.
            sequence_id = self._scheduler.add(sequence, request.arrival_ns * 1e-9)
        except LateError as error:
            self.classes.refuse(request.service_class.name)
            raise refusals.too_late(error, request.service_class.name, self.in_hand.place_free_s) from error
        except AdmissionError as error:
            raise self._refusal(error, sequence, prompt_field) from error
        generation = Generation(request, sequence_id, self._tokenizer)
        if not self.in_hand:
            self._last_progress_s = time.monotonic()
        self.in_hand.add(generation)
        self.wake.set()
        return generation

    @property
    def room_tokens(self) -> int:
        """Tokens of prompt and answer that the KV cache has room for in one sequence."""
        # The last token is sent and never attended: it needs no room.
        return largest_tier_tokens(self._capacity, self._mode) + 1 if self._capacity else 0

    # --- what ExecutorLoop asks

    def all_fit(self, capacity: Capacity) -> bool:
        """Whether an epoch with this capacity could serve all requests in hand."""
        return self._scheduler is None or all(
            fits(sequence.request, capacity, self._mode) for sequence in self._scheduler.sequences
        )

    def open(self, capacity: Capacity, estimator: Estimator, epoch: int) -> None:
        """An epoch begins, with requests in hand or without; those that cannot go on in it fail."""
        if self._scheduler is None:
            self._scheduler = Scheduler(capacity, estimator, self._mode, self._max_waiting, epoch)
            lost: tuple[int, ...] = ()
        else:
            lost = self._scheduler.reset(capacity, estimator, epoch)
        self._capacity = capacity
        pairs = zip_longest(capacity.host_pools, self._whole_pools, fillvalue=0)
        self._whole_pools = tuple(now or before for now, before in pairs)
        self.availability.open()
        self._last_progress_s = time.monotonic()
        text = "the request fits nowhere without a CPU attention service that was lost"
        for sequence_id in lost:
            if generation := self.in_hand.of(sequence_id):
                self.in_hand.fail(generation, unavailable("CPU_ATTENTION_LOST", text, _RETRY_S))
        self.wake.set()
        self.changed.set()

    def suspend(self) -> None:
        """One epoch is over and the next is being opened: requests wait, and waiting is no stall."""
        self.availability.is_suspended = True

    def lose_executor(self, running: Collection[int], is_certain: bool, is_wanted: bool = False) -> None:
        """There is no executor: requests in hand wait for `open`, or for `close`, and new ones are refused.

        `running`: sequences that it was computing. Not certain: something else may have brought it down. Wanted: it was
        told to stop, which is no loss to count.
        """
        self.availability.close()
        self.counters.executor_losses += not is_wanted
        self.changed.set()
        self.note_failure(running, is_certain)

    def note_failure(self, running: Collection[int], is_certain: bool = True) -> None:
        """What the executor was computing is lost. Ends those that it fails at time and again; all others wait."""
        if self._scheduler is None:
            return
        for sequence_id, verdict in self._scheduler.lose(running, is_certain):
            if generation := self.in_hand.of(sequence_id):
                logger.error("request %s ends: the executor fails at it", generation.request.request_id)
                self.in_hand.fail(generation, refusals.not_computed_again(verdict))

    def close(self, error: ServiceError) -> None:
        """No executor: every request fails, and new ones are refused until `open`."""
        self.availability.close()
        self.changed.set()
        self.in_hand.fail_all(error)

    def abandon(self, error: ServiceError) -> None:
        """The scheduler's state can't be trusted any more: as `close`, and the next epoch begins with a new one."""
        self._scheduler = None
        self.close(error)

    def plan(self) -> IterationPlan | None:
        """What to run next, if anything."""
        assert self._scheduler is not None
        start_ns = time.monotonic_ns()
        plan = self._scheduler.plan(start_ns * 1e-9)
        end_ns = time.monotonic_ns()
        self.counters.planning_ns += end_ns - start_ns
        for new in plan.new_sequences if plan else ():
            if generation := self.in_hand.of(new.sequence_id):
                generation.note_planned(end_ns)
        self.last_plan = plan or self.last_plan
        return plan

    @property
    def num_by_pool(self) -> tuple[int, ...]:
        """Sequences with their KV in each host pool, by the latest plan."""
        return self._scheduler.num_by_pool if self._scheduler else ()

    @property
    def demand(self) -> Demand:
        return self._scheduler.demand if self._scheduler else Demand()

    def apply(self, result: IterationResult) -> tuple[TokenEvent, ...]:
        """Advances the sequences; the tokens are still to be delivered. The result is no failure."""
        assert self._scheduler is not None
        self._last_progress_s = time.monotonic()
        self.last_result = result
        self.counters.add(result)
        for sequence_id, part in result.prompt_logprobs:
            if generation := self.in_hand.of(sequence_id):
                generation.push_prompt(part)
        for sequence_id, message in result.grammar_failures.items():
            if generation := self.in_hand.of(sequence_id):
                self.in_hand.fail(generation, invalid_argument("request.constraint", message, "CONSTRAINT_FAILED"))
        for sequence_id in result.not_finite:
            if generation := self.in_hand.of(sequence_id):
                self._scheduler.forget_content(sequence_id)
                self.in_hand.fail(generation, refusals.not_finite())
        tokens = self._scheduler.apply(result, self._last_progress_s).tokens
        for token in tokens:
            if token.finish:  # The scheduler forgets it with the next plan.
                self._histories[token.sequence_id] = self._scheduler.history(token.sequence_id)
        return tokens

    def drain(self) -> None:
        """Accepts nothing more; `in_hand.idle` tells when the requests in hand have ended."""
        self.availability.is_draining = True
        self.changed.set()

    def span_of(self, sequence_id: int) -> RequestSpan | None:
        """Of a request that has not ended."""
        generation = self.in_hand.of(sequence_id)
        return generation.request.span if generation else None

    # --- what health and load balancers ask

    @property
    def is_draining(self) -> bool:
        return self.availability.is_draining

    @property
    def standing_s(self) -> float:
        """For how long there has been work and none of it got ahead; 0 where there is nothing to do."""
        waits = self.availability.is_open and not self.availability.is_suspended and bool(self.in_hand)
        return time.monotonic() - self._last_progress_s if waits else 0.0

    def is_alive(self) -> bool:
        """False where it has stood for too long."""
        return self.standing_s < self._stalled_after_s

    def is_ready(self) -> bool:
        """Whether a request would be served now."""
        return not self.why_not_ready()

    def why_not_ready(self) -> str:
        """In words; empty where a request would be served now."""
        if self.availability.is_draining:
            return "the server is shutting down"
        if not self.availability.is_open:
            return self.availability.what_is_awaited
        if self.room_tokens <= 1:
            return "no CPU attention service is attached, and the GPU has no KV cache"
        return "" if self.is_alive() else f"no iteration has ended for {self._stalled_after_s:g} s"

    def load(self) -> Load:
        scheduler, capacity = self._scheduler, self._capacity
        if scheduler is None or capacity is None:
            return Load(max_waiting=self._max_waiting)
        return Load(
            num_waiting=scheduler.num_waiting,
            num_preempted=scheduler.num_preempted,
            num_running=scheduler.num_running,
            max_waiting=self._max_waiting,
            gpu_blocks_used=scheduler.gpu_blocks_used,
            gpu_blocks=capacity.gpu_blocks,
            host_blocks_used=scheduler.host_blocks_used,
            host_blocks=capacity.host_blocks,
            pool_blocks_used=scheduler.pool_blocks_used,
            pool_blocks=capacity.host_pools,
            classes=self.classes.loads(scheduler.num_waiting_of),
        )

    @property
    def sequences(self) -> Iterator[tuple[Sequence, str]]:
        """Those in hand with their requests' ids, in order of arrival."""
        for sequence in self._scheduler.sequences if self._scheduler else ():
            generation = self.in_hand.of(sequence.sequence_id)
            yield sequence, generation.request.request_id if generation else ""

    def scheduler_counters(self) -> SchedulerCounters:
        """What the scheduler has counted since the planner started."""
        return self._scheduler.counters if self._scheduler else SchedulerCounters()

    def calibration_factors(self) -> Factors | None:
        """What was learned of the executor; None before its first epoch."""
        return self._scheduler.calibration_factors if self._scheduler else None

    def _release(self, sequence_id: int) -> History:
        """Frees what a sequence holds; returns what became of its KV."""
        history = self._histories.pop(sequence_id, None)
        if self._scheduler is not None:
            history = history or self._scheduler.history(sequence_id)
            self._scheduler.finish(sequence_id)
        self.wake.set()  # The executor is to be told.
        return history or History()

    def _refusal(self, error: AdmissionError, request: SequenceRequest, prompt_field: str) -> ServiceError:
        if error.reason is AdmissionReason.QUEUE_FULL:
            return refusals.queue_full(error.limit, self.in_hand.place_free_s)
        assert self._capacity is not None
        if fits(request, replace(self._capacity, host_pools=self._whole_pools), self._mode):
            text = "the request needs the KV cache of a CPU attention service that is not attached now"
            return unavailable("CPU_ATTENTION_LOST", text, _RETRY_S)
        return refusals.never_fits(error, prompt_field)
