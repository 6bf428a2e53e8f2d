"""The requests being served: from the door into the scheduler, and from its tokens back to each caller.

No I/O: ExecutorLoop moves plans and results, the servicer moves messages. All methods run on the event loop's thread.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest

from planner_svc import refusals
from planner_svc.availability import Availability
from planner_svc.classes import ServiceClasses
from planner_svc.counters import ClassTallies, Counters, FinishRate, Load
from planner_svc.estimator import Estimator, Factors
from planner_svc.generation import EndReason, Generation, GenerationRequest
from planner_svc.request_meters import CALLER_GONE, RequestMeters
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
        self._meters = meters
        self._mode = mode
        self._max_waiting = max_waiting
        self._scheduler: Scheduler | None = None
        self._capacity: Capacity | None = None
        self._whole_pools: tuple[int, ...] = ()
        """Blocks of the host pools, of one that is not attached now as many as it had: that is a passing state."""
        self.availability = Availability()
        self._by_request: dict[str, Generation] = {}
        self._by_sequence: dict[int, Generation] = {}
        self._histories: dict[int, History] = {}
        """Of sequences that have ended in the scheduler while their last tokens are still to be delivered."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._last_progress_s = 0.0
        self.last_plan: IterationPlan | None = None
        self.last_result: IterationResult | None = None
        self._finish_rate = FinishRate()
        self.counters = Counters()
        self.classes = ClassTallies(classes.by_name)
        self.wake = asyncio.Event()
        """Set when there may be something to plan."""
        self.changed = asyncio.Event()
        """Set when readiness may have changed other than by time."""
        self.idle = asyncio.Event()
        """Set while no request is in hand."""
        self.idle.set()

    # --- what callers ask

    def check_open(self, request_id: str) -> None:
        """Raises ServiceError where a request with this id would be refused now, whatever it holds."""
        self.availability.check()
        assert self._scheduler is not None
        if request_id in self._by_request:
            raise already_exists("REQUEST_ID_IN_USE", f"request {request_id!r} is running")
        if self._scheduler.num_waiting >= self._max_waiting:
            raise refusals.queue_full(self._max_waiting, self._place_free_s())

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
        now_s = time.monotonic()
        try:
            # Its targets count from the call, not from when the prompt was tokenized.
            sequence_id = self._scheduler.add(sequence, request.arrival_ns * 1e-9)
        except LateError as error:
            self.classes.refuse(request.service_class.name)
            raise refusals.too_late(error, request.service_class.name, self._place_free_s()) from error
        except AdmissionError as error:
            raise self._refusal(error, sequence, prompt_field) from error
        generation = Generation(request, sequence_id, self._tokenizer)
        if not self._by_request:
            self._last_progress_s = now_s
        self._by_request[request.request_id] = self._by_sequence[sequence_id] = generation
        self.idle.clear()
        if request.time_limit_s is not None:
            left_s = request.arrival_ns * 1e-9 + request.time_limit_s - now_s
            loop = asyncio.get_running_loop()
            self._timers[sequence_id] = loop.call_later(left_s, self._finish, generation, EndReason.TIME_LIMIT)
        self.counters.accepted_requests += 1
        self.classes.accept(request.service_class.name)
        self.wake.set()
        return generation

    def withdraw(self, generation: Generation) -> None:
        """The caller has gone: frees what the request holds. Does nothing where it has ended."""
        if self._remove(generation) is not None:
            self._meters.failed(generation, CALLER_GONE, time.monotonic_ns())

    def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Ends requests by id; returns those that were running."""
        found = [
            self._by_request[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._by_request
        ]
        for generation in found:
            self._finish(generation, EndReason.ABORT)
        return tuple(generation.request.request_id for generation in found)

    @property
    def has_requests(self) -> bool:
        """Whether any is in hand."""
        return bool(self._by_request)

    @property
    def grammars(self) -> set[str]:
        """That requests in hand are bound to."""
        return {generation.request.sampling.grammar for generation in self._by_request.values()} - {""}

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
            self._fail(self._by_sequence[sequence_id], unavailable("CPU_ATTENTION_LOST", text, _RETRY_S))
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
            generation = self._by_sequence[sequence_id]
            logger.error("request %s ends: the executor fails at it", generation.request.request_id)
            self._fail(generation, refusals.not_computed_again(verdict))

    def close(self, error: ServiceError) -> None:
        """No executor: every request fails, and new ones are refused until `open`."""
        self.availability.close()
        self.changed.set()
        self.fail_all(error)

    def abandon(self, error: ServiceError) -> None:
        """The scheduler's state can't be trusted any more: as `close`, and the next epoch begins with a new one."""
        self._scheduler = None
        self.close(error)

    def fail_all(self, error: ServiceError) -> None:
        """Every request in hand fails; new ones are still accepted."""
        for generation in list(self._by_request.values()):
            self._fail(generation, error)

    def plan(self) -> IterationPlan | None:
        """What to run next, if anything."""
        assert self._scheduler is not None
        start_ns = time.monotonic_ns()
        plan = self._scheduler.plan(start_ns * 1e-9)
        end_ns = time.monotonic_ns()
        self.counters.planning_ns += end_ns - start_ns
        for new in plan.new_sequences if plan else ():
            if generation := self._by_sequence.get(new.sequence_id):
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
            if generation := self._by_sequence.get(sequence_id):
                generation.push_prompt(part)
        for sequence_id, message in result.grammar_failures.items():
            if generation := self._by_sequence.get(sequence_id):
                self._fail(generation, invalid_argument("request.constraint", message, "CONSTRAINT_FAILED"))
        for sequence_id in result.not_finite:
            if generation := self._by_sequence.get(sequence_id):
                self._scheduler.forget_content(sequence_id)
                self._fail(generation, refusals.not_finite())
        tokens = self._scheduler.apply(result, self._last_progress_s).tokens
        for token in tokens:
            if token.finish:  # The scheduler forgets it with the next plan.
                self._histories[token.sequence_id] = self._scheduler.history(token.sequence_id)
        return tokens

    def deliver(self, tokens: Iterable[TokenEvent]) -> None:
        """Gives tokens to their requests, and ends those that are complete."""
        now_ns = time.monotonic_ns()
        gaps: dict[tuple[str, int], int] = {}
        """How many tokens follow one of that class that came at that time: there are far fewer such times."""
        for token in tokens:
            generation = self._by_sequence.get(token.sequence_id)
            if generation is None:  # Ended since the result was applied.
                continue
            if generation.last_token_ns:
                gap = generation.request.service_class.name, generation.last_token_ns
                gaps[gap] = gaps.get(gap, 0) + 1
            ends = token.finish == "end_token"
            stop = generation.push(token.token_id, token.logprobs, ends, now_ns)
            if ends:
                self._finish(generation, EndReason.END_TOKEN, token.token_id)
            elif stop is not None:
                self._finish(generation, EndReason.STOP_TEXT, stop)
            elif token.finish == "length":
                self._finish(generation, EndReason.LENGTH)
        for (class_name, before_ns), num in gaps.items():
            self._meters.inter_token(class_name).observe((now_ns - before_ns) / 1e9, num)

    def drain(self) -> None:
        """Accepts nothing more; `idle` tells when the requests in hand have ended."""
        self.availability.is_draining = True
        self.changed.set()

    def span_of(self, sequence_id: int) -> RequestSpan | None:
        """Of a request that has not ended."""
        generation = self._by_sequence.get(sequence_id)
        return generation.request.span if generation else None

    # --- what health and load balancers ask

    @property
    def is_draining(self) -> bool:
        return self.availability.is_draining

    @property
    def num_requests(self) -> int:
        """In hand."""
        return len(self._by_request)

    @property
    def standing_s(self) -> float:
        """For how long there has been work and none of it got ahead; 0 where there is nothing to do."""
        waits = self.availability.is_open and not self.availability.is_suspended and bool(self._by_request)
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
            generation = self._by_sequence.get(sequence.sequence_id)
            yield sequence, generation.request.request_id if generation else ""

    def scheduler_counters(self) -> SchedulerCounters:
        """What the scheduler has counted since the planner started."""
        return self._scheduler.counters if self._scheduler else SchedulerCounters()

    def calibration_factors(self) -> Factors | None:
        """What was learned of the executor; None before its first epoch."""
        return self._scheduler.calibration_factors if self._scheduler else None

    # --- how requests end

    def _finish(self, generation: Generation, reason: EndReason, matched: str | int | None = None) -> None:
        history = self._remove(generation)
        if history is not None:
            now_ns = time.monotonic_ns()
            generation.finish(reason, matched, history, now_ns)
            self.classes.judge(generation.request.service_class.name, generation.finished.targets_met)
            self._meters.finished(generation, now_ns)

    def _fail(self, generation: Generation, error: ServiceError) -> None:
        if self._remove(generation) is not None:
            generation.fail(error)
            self._meters.failed(generation, error.reason, time.monotonic_ns())

    def _remove(self, generation: Generation) -> History | None:
        """Frees what the request holds; returns what became of its KV, or None where it had ended before."""
        if self._by_sequence.pop(generation.sequence_id, None) is None:
            return None
        del self._by_request[generation.request.request_id]
        self.classes.end(generation.request.service_class.name)
        timer = self._timers.pop(generation.sequence_id, None)
        if timer:
            timer.cancel()
        history = self._histories.pop(generation.sequence_id, None)
        if self._scheduler is not None:
            history = history or self._scheduler.history(generation.sequence_id)
            self._scheduler.finish(generation.sequence_id)
        self.counters.finished_requests += 1
        self._finish_rate.add(time.monotonic())
        if not self._by_request:
            self.idle.set()
        self.wake.set()  # The executor is to be told.
        return history or History()

    def _refusal(self, error: AdmissionError, request: SequenceRequest, prompt_field: str) -> ServiceError:
        if error.reason is AdmissionReason.QUEUE_FULL:
            return refusals.queue_full(error.limit, self._place_free_s())
        assert self._capacity is not None
        if fits(request, replace(self._capacity, host_pools=self._whole_pools), self._mode):
            text = "the request needs the KV cache of a CPU attention service that is not attached now"
            return unavailable("CPU_ATTENTION_LOST", text, _RETRY_S)
        return refusals.never_fits(error, prompt_field)

    def _place_free_s(self) -> float:
        """Until a request is likely to end."""
        return self._finish_rate.retry_after_s(time.monotonic())
