"""Owns the queues and both block allocators: `plan` makes an IterationPlan, `apply` takes its result."""

from collections.abc import Collection, Iterable
from typing import Literal

from planner_svc.estimator import Calibration, Estimator, Factors
from planner_svc.scheduler.admission import AdmissionError, AdmissionReason, check, fits
from planner_svc.scheduler.assembly import Assembly
from planner_svc.scheduler.batch import Batch
from planner_svc.scheduler.cohort import Cohort
from planner_svc.scheduler.costs import Costs
from planner_svc.scheduler.decision import decide
from planner_svc.scheduler.demand import Demand
from planner_svc.scheduler.events import Applied, Counters, History, Tally, TokenEvent
from planner_svc.scheduler.forecast import Forecast
from planner_svc.scheduler.in_flight import InFlight, Planned
from planner_svc.scheduler.limits import Capacity, ModePolicy
from planner_svc.scheduler.pace import Mix
from planner_svc.scheduler.placement import Placement
from planner_svc.scheduler.reservation import Reservation
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence, SequenceRequest, State
from planner_svc.scheduler.trials import Trials, Verdict, note_loss
from planner_svc.scheduler.urgency import arrive, order_decodes, take_first_token
from planner_svc.scheduler.waiting import WaitingQueue
from svc_common.plan import IterationPlan, IterationResult, Tier


class Scheduler:
    """Continuous batching with chunked prefill over two tiers. Not thread-safe: one engine owns it.

    Times are seconds of the caller's clock. Requests with targets run in the order in which their tokens are due,
    others in order of arrival.
    """

    def __init__(
        self, capacity: Capacity, estimator: Estimator, mode: ModePolicy, max_waiting: int, epoch: int = 1
    ) -> None:
        self._policy: ModePolicy = mode
        self._max_waiting = max_waiting
        self._tally = Tally()
        self._mix = Mix()
        self._next_id = 1
        self._live: dict[int, Sequence] = {}
        """Neither finished nor lost."""
        self._gone: dict[int, Sequence] = {}
        """Finished since the last plan."""
        self._calibration = Calibration(estimator)
        self._open_epoch(capacity, epoch)

    def _open_epoch(self, capacity: Capacity, epoch: int) -> None:
        self._capacity = capacity
        self._epoch = epoch
        self._iteration = 0
        self._in_flight = InFlight()
        self._queue = WaitingQueue()
        self._trials = Trials()
        self._residency = Residency(capacity)
        self._costs = Costs(capacity, self._calibration)
        self._placement = Placement(capacity, self._policy, self._residency, self._queue, self._tally, self._costs)
        self._forecast = Forecast(capacity, self._calibration, self._costs, self._residency, self._queue)
        self._reservation = Reservation(self._residency, self._placement, self._queue, self._tally)
        self._cohort = Cohort(self._residency)
        self._nothing_to_plan = False
        """The last attempt found nothing, and nothing has changed since."""
        self._assembly = Assembly(
            capacity,
            self._calibration,
            self._policy,
            self._residency,
            self._placement,
            self._queue,
            self._mix,
            self._costs,
        )

    # --- requests

    def add(self, request: SequenceRequest, now: float) -> int:
        """Queues a request and returns its sequence id. Raises AdmissionError, and then costs nothing."""
        check(request, self._capacity, self._policy)
        if self.num_waiting >= self._max_waiting:
            raise AdmissionError(AdmissionReason.QUEUE_FULL, "requests", self._max_waiting)
        self._forecast.check(request, self._in_flight.start_s(now), now)
        sequence = Sequence(self._next_id, request)
        self._next_id += 1
        arrive(sequence, now)
        self._mix.arrive(sequence)
        self._live[sequence.sequence_id] = sequence
        if self._trials.are_on:
            self._trials.hold(sequence)
        else:
            self._queue.append(sequence)
        self._nothing_to_plan = False
        return sequence.sequence_id

    def finish(self, sequence_id: int) -> None:
        """Ends a sequence: frees its blocks at once, or when its cohort's step ends; drops its tokens in flight.

        Does nothing for one that ended.
        """
        sequence = self._live.pop(sequence_id, None)
        if sequence is None:
            return
        if sequence.outputs:
            self._mix.finish()
        self._forecast.note_end(sequence)
        if sequence.state is State.RUNNING:
            self._residency.leave(sequence, State.FINISHED)
        elif sequence.state is State.WAITING and not self._trials.drop(sequence):
            self._queue.remove(sequence)
        sequence.state = State.FINISHED
        self._gone[sequence_id] = sequence
        self._nothing_to_plan = False
        self._try_next()

    # --- plans and results

    def has_work(self) -> bool:
        """False: `plan` would return None. True: it is worth asking; an answer of None then lasts until a change."""
        if self._in_flight.is_full or self._nothing_to_plan:
            return False
        if self._trials.is_over and not self._cohort.is_under_way:
            return False  # The next is tried by itself, once nothing of this one is in flight.
        return bool(self._live or self._residency.changes or self._cohort.is_under_way)

    def plan(self, now: float) -> IterationPlan | None:
        """The next iteration, its blocks and tokens reserved; None where there is nothing to do or tell.

        May be called before the previous plan's result is applied, at most one plan ahead.
        """
        if not self.has_work():
            return None
        self._gone.clear()
        placement, residency, cohort = self._placement, self._residency, self._cohort
        self._forecast.note_overdue(self._queue.refresh(now))
        placement.retire_spent()
        placement.swap_in()
        start_s = self._in_flight.start_s(now)
        decodes = placement.reserve_decodes(self._capacity.max_batch_tokens, cohort.members)
        order_decodes(decodes.host)
        work, limits, held_back = self._assembly.collect(decodes, cohort, start_s)
        has_cpu_layers = self._capacity.has_cpu_layers
        decision = decide(work, limits, self._calibration, self._policy, start_s, cohort.is_under_way, has_cpu_layers)
        batch = work.batch(decision.shape)
        passed_over = [] if batch.cohort else work.cpu_decodes[decision.shape.num_cpu_decodes :]
        for sequence in (*passed_over, *held_back):
            sequence.num_passed_over += 1
        expected = self._reservation.take(batch, start_s + decision.predicted_s)
        self._account(batch, now)
        self._nothing_to_plan = not (batch.has_work or residency.changes)
        if self._nothing_to_plan:
            return None
        self._iteration += 1
        plan = self._make_plan(batch, decision.predicted_s)
        load = work.load(decision.shape)
        self._in_flight.add(Planned(plan.iteration, plan.mode, batch.has_work, load, expected, plan.predicted_s), now)
        if batch.cohort:
            cohort.take(batch.cohort)
        return plan

    def _account(self, batch: Batch, now: float) -> None:
        """What the plan gives to whom, for those who share it out and who foretell."""
        self._residency.note_prefilled(sum(chunk.num_tokens for chunk in (*batch.chunks[0], *batch.chunks[1])))
        admitted = self._residency.changes.new_sequences
        self._forecast.note_plan(sum(len(new.token_ids) for new in admitted), now)
        if not self._queue.shares.is_single:
            self._queue.shares.charge(batch)

    def _make_plan(self, batch: Batch, predicted_s: float) -> IterationPlan:
        changes = self._residency.take_changes()
        swaps = changes.ordered_swaps()
        if swaps:
            num_in = sum(swap.target is Tier.GPU for swap in swaps)
            self._tally.add(swaps_in=num_in, swaps_out=len(swaps) - num_in)
        return IterationPlan(
            epoch=self._epoch,
            iteration=self._iteration,
            mode=batch.mode,
            released=tuple(changes.released),
            new_sequences=tuple(changes.new_sequences),
            swaps=swaps,
            new_blocks=changes.ordered_new_blocks(),
            sub_batches=batch.sub_batches(),
            cohort=batch.cohort_step(),
            predicted_s=predicted_s,
            pool_decodes=batch.pool_decodes(len(self._capacity.host_pools)),
        )

    def apply(self, result: IterationResult, now: float) -> Applied:
        """Takes the result of the oldest plan not yet applied; one of an earlier epoch changes nothing.

        Sequences that end here by an end token or by length are finished. Raises ValueError, and changes nothing, for
        a result that failed or that does not answer the plan.
        """
        if result.epoch != self._epoch:
            return Applied()
        planned = self._in_flight.take(result, now)
        self._nothing_to_plan = False
        if planned.computes:
            self._calibration.observe(planned.mode, planned.load, result.timings, result.pool_work)
            self._costs.refresh()
        events = [
            self._take_token(sequence, token_id, result, now)
            for sequence_id, token_id in result.tokens
            if (sequence := self._live.get(sequence_id)) is not None
        ]
        if planned.computes:
            self._tally.add(**{f"{planned.mode.value}_iterations": 1})
        self._tally.add(generated_tokens=len(events))
        self._mix.take_tokens(len(events))
        self._try_next()
        return Applied(tuple(events))

    def _take_token(self, sequence: Sequence, token_id: int, result: IterationResult, now: float) -> TokenEvent:
        sequence.num_in_flight -= 1
        if not sequence.outputs:
            take_first_token(sequence, now)
            self._forecast.note_first_token(sequence)
        sequence.outputs.append(token_id)
        finish: Literal["end_token", "length"] | None = None
        if token_id in sequence.request.end_token_ids:
            finish = "end_token"
        elif len(sequence.outputs) == sequence.request.max_new_tokens:
            finish = "length"
        if finish:
            self._forecast.note_last_token(sequence, now)
            self.finish(sequence.sequence_id)
        return TokenEvent(sequence.sequence_id, token_id, result.logprobs.get(sequence.sequence_id), finish)

    # --- failure

    def lose(self, running: Collection[int], is_certain: bool = True) -> tuple[tuple[int, Verdict], ...]:
        """The executor holds nothing any more: plans in flight are forgotten, and all sequences wait for `reset`.

        `running` are those that it was computing; not certain: something else may have brought it down. Returns those
        that are not to be computed again: the caller finishes them.
        """
        verdicts = []
        for sequence_id in sorted(running):
            sequence = self._live.get(sequence_id)
            if sequence is not None and (verdict := note_loss(sequence, is_certain)):
                verdicts.append((sequence_id, verdict))
        self._open_epoch(self._capacity, self._epoch)
        self._queue_again(self._live.values())
        return tuple(verdicts)

    def forget_content(self, sequence_id: int) -> None:
        """What it computed is of no use to others that begin like it."""
        sequence = self._live.get(sequence_id)
        if sequence is not None and sequence.state in (State.RUNNING, State.STEPPING):
            self._residency.forget_content(sequence)

    def reset(self, capacity: Capacity, estimator: Estimator, epoch: int) -> tuple[int, ...]:
        """Starts a new epoch on an executor that holds nothing: plans in flight are forgotten.

        Sequences are queued again in order of arrival, to be recomputed from prompt and tokens applied so far.
        Returns those that are lost instead, as they fit nowhere any more.
        """
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} does not follow {self._epoch}")
        if estimator is not self._calibration.base:  # What was learned of the same one still holds.
            self._calibration = Calibration(estimator)
        self._open_epoch(capacity, epoch)
        lost = [key for key, item in self._live.items() if not fits(item.request, capacity, self._policy)]
        for sequence_id in lost:
            sequence = self._live.pop(sequence_id)
            sequence.state = State.FINISHED
            self._gone[sequence_id] = sequence
        self._queue_again(self._live.values())
        return tuple(sorted(lost))

    def _queue_again(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.num_recomputations += sequence.state in (State.RUNNING, State.STEPPING, State.DRAINING)
            sequence.await_recomputation()
        self._trials = Trials(sorted(sequences, key=lambda sequence: sequence.sequence_id))
        self._release()

    def _try_next(self) -> None:
        """Where a trial is over and nothing of it is in flight: another's begins."""
        if not self._trials.is_over or self._in_flight or self._cohort.is_under_way:
            return
        passed = self._trials.passed
        if passed is not None and passed.state in (State.RUNNING, State.WAITING):
            if passed.state is State.RUNNING:
                passed.num_recomputations += 1
                passed.num_passed_over = 0
                self._residency.leave(passed, State.WAITING)
            else:
                self._queue.remove(passed)
            self._trials.hold(passed)
        self._release()

    def _release(self) -> None:
        """The next on trial may be planned, or all others."""
        for sequence in self._trials.release():
            self._queue.append(sequence)

    # --- views

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """In hand, in order of arrival; to be looked at only."""
        return tuple(self._live.values())

    @property
    def num_waiting(self) -> int:
        """Accepted and without blocks: not yet started, or preempted."""
        return len(self._queue) + len(self._trials)

    @property
    def num_preempted(self) -> int:
        """Of those that wait, those that ran before."""
        return self._queue.num_returned

    def num_waiting_of(self, class_name: str) -> int:
        """Those of one class."""
        return self._queue.num_of(class_name) + self._trials.num_of(class_name)

    @property
    def num_running(self) -> int:
        """Started, and not waiting to be recomputed."""
        return len(self._live) - self.num_waiting

    @property
    def gpu_blocks_used(self) -> int:
        return self._residency.used(Tier.GPU)

    @property
    def host_blocks_used(self) -> int:
        return self._residency.used(Tier.HOST)

    @property
    def num_by_pool(self) -> tuple[int, ...]:
        """Sequences with their KV in each host pool."""
        return tuple(map(self._residency.num_in, range(len(self._capacity.host_pools))))

    @property
    def pool_blocks_used(self) -> tuple[int, ...]:
        """Blocks of each host pool owned by sequences."""
        return tuple(map(self._residency.used_in, range(len(self._capacity.host_pools))))

    @property
    def demand(self) -> Demand:
        return Demand(
            num_sequences=len(self._live),
            prompt_tokens=self._mix.prompt_tokens,
            output_tokens=self._mix.output_tokens,
            computed_tokens=sum(sequence.num_computed_tokens for sequence in self._live.values()),
        )

    @property
    def counters(self) -> Counters:
        return self._tally.counters

    @property
    def calibration_factors(self) -> Factors:
        """What was learned of the executor, by part of the cost."""
        return self._calibration.factors

    def history(self, sequence_id: int) -> History:
        """Of one that ended: known until the next plan, empty from then on."""
        sequence = self._live.get(sequence_id) or self._gone.get(sequence_id)
        return History(sequence.num_recomputations, sequence.num_cached_tokens) if sequence else History()
