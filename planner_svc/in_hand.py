"""The requests in hand: tokens go from the scheduler's events to their callers, and each request ends exactly once.

No I/O. All methods run on the event loop's thread.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from planner_svc.counters import ClassTallies, Counters, FinishRate
from planner_svc.generation import EndReason, Generation
from planner_svc.request_meters import CALLER_GONE, RequestMeters
from planner_svc.scheduler import History, TokenEvent
from svc_common.errors import ServiceError


class InHand:
    """Generations by request id and by sequence id; those that have ended are forgotten."""

    def __init__(
        self, meters: RequestMeters, classes: ClassTallies, counters: Counters, release: Callable[[int], History]
    ) -> None:
        """`release` frees what a sequence holds, and says what became of its KV."""
        self._meters = meters
        self._classes = classes
        self._counters = counters
        self._release = release
        self._by_request: dict[str, Generation] = {}
        self._by_sequence: dict[int, Generation] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._finish_rate = FinishRate()
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Generation]:
        """In order of arrival."""
        return iter(self._by_request.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def of(self, sequence_id: int) -> Generation | None:
        """None where it has ended."""
        return self._by_sequence.get(sequence_id)

    @property
    def grammars(self) -> set[str]:
        """That they are bound to."""
        return {generation.request.sampling.grammar for generation in self} - {""}

    @property
    def place_free_s(self) -> float:
        """Until one is likely to end."""
        return self._finish_rate.retry_after_s(time.monotonic())

    def add(self, generation: Generation) -> None:
        """Its time limit begins with its arrival."""
        request = generation.request
        self._by_request[request.request_id] = self._by_sequence[generation.sequence_id] = generation
        self.idle.clear()
        if request.time_limit_s is not None:
            left_s = request.arrival_ns * 1e-9 + request.time_limit_s - time.monotonic()
            loop = asyncio.get_running_loop()
            timer = loop.call_later(left_s, self._finish, generation, EndReason.TIME_LIMIT)
            self._timers[generation.sequence_id] = timer
        self._counters.accepted_requests += 1
        self._classes.accept(request.service_class.name)

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

    # --- how they end

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

    def fail(self, generation: Generation, error: ServiceError) -> None:
        """Does nothing where it has ended."""
        if self._remove(generation) is not None:
            generation.fail(error)
            self._meters.failed(generation, error.reason, time.monotonic_ns())

    def fail_all(self, error: ServiceError) -> None:
        """New ones are still accepted."""
        for generation in list(self):
            self.fail(generation, error)

    def _finish(self, generation: Generation, reason: EndReason, matched: str | int | None = None) -> None:
        history = self._remove(generation)
        if history is not None:
            now_ns = time.monotonic_ns()
            generation.finish(reason, matched, history, now_ns)
            self._classes.judge(generation.request.service_class.name, generation.finished.targets_met)
            self._meters.finished(generation, now_ns)

    def _remove(self, generation: Generation) -> History | None:
        """Frees what the request holds; returns what became of its KV, or None where it had ended before."""
        if self._by_sequence.pop(generation.sequence_id, None) is None:
            return None
        del self._by_request[generation.request.request_id]
        self._classes.end(generation.request.service_class.name)
        timer = self._timers.pop(generation.sequence_id, None)
        if timer:
            timer.cancel()
        history = self._release(generation.sequence_id)
        self._counters.finished_requests += 1
        self._finish_rate.add(time.monotonic())
        if not self._by_request:
            self.idle.set()
        return history
