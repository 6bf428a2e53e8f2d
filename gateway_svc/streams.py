"""The answers of one HTTP request as they come: one gRPC stream each, merged."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc.planner import Metadata, Planner, StreamCall
from neoflex import errors
from neoflex.errors import NeoflexError
from neoflex.v1 import inference_pb2 as pb

_MAX_HELD_EVENTS = 64
"""A caller that reads slowly holds up the streams, and the planner joins what waits there."""


@dataclass(frozen=True, slots=True)
class Event:
    """What came from one of the streams."""

    index: int
    what: pb.GenerationDelta | pb.GenerationFinished


class MergedStreams:
    """Open it first; `close` ends what still runs, however far it came."""

    def __init__(self, planner: Planner, requests: Sequence[pb.GenerateRequest], metadata: Metadata) -> None:
        self._planner = planner
        self._calls = [planner.stream(request, metadata) for request in requests]
        self._queue: asyncio.Queue[Event | NeoflexError] = asyncio.Queue(_MAX_HELD_EVENTS)
        self._num_running = len(requests)
        self._failure: NeoflexError | None = None
        self._pumps: list[asyncio.Task[None]] = []

    async def open(self) -> list[int]:
        """Once all are accepted: tokens of each prompt. Raises NeoflexError where one is refused."""
        prompt_tokens = await asyncio.gather(*(self._started(call) for call in self._calls))
        self._pumps = [asyncio.create_task(self._pump(index, call)) for index, call in enumerate(self._calls)]
        return prompt_tokens

    async def next_events(self, quiet_s: float) -> list[Event]:
        """All that has come, at least one; none after `quiet_s` seconds without any.

        Raises NeoflexError where a stream failed, once all that came before is out.
        """
        if self._failure is not None:
            raise self._failure
        events: list[Event] = []
        try:
            async with asyncio.timeout(quiet_s):
                self._take(await self._queue.get(), events)
        except TimeoutError:
            return []
        while not self._queue.empty() and self._failure is None:
            self._take(self._queue.get_nowait(), events)
        if not events and self._failure is not None:
            raise self._failure
        return events

    @property
    def ended(self) -> bool:
        """Whether all streams have said that they are finished."""
        return not self._num_running

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _started(self, call: StreamCall) -> int:
        with self._planner.failures():
            first = await call.read()
        if not (isinstance(first, pb.GenerateStreamResponse) and first.HasField("started")):
            raise errors.cut_short(self._planner.address)
        return first.started.prompt_tokens

    def _take(self, item: Event | NeoflexError, events: list[Event]) -> None:
        if isinstance(item, NeoflexError):
            self._failure = item
        else:
            self._num_running -= isinstance(item.what, pb.GenerationFinished)
            events.append(item)

    async def _pump(self, index: int, call: StreamCall) -> None:
        try:
            with self._planner.failures():
                while isinstance(message := await call.read(), pb.GenerateStreamResponse):
                    if message.HasField("delta"):
                        await self._queue.put(Event(index, message.delta))
                    elif message.HasField("finished"):
                        await self._queue.put(Event(index, message.finished))
                        return
            await self._queue.put(errors.cut_short(self._planner.address))
        except NeoflexError as error:
            await self._queue.put(error)


async def whole_answers(
    planner: Planner, requests: Sequence[pb.GenerateRequest], metadata: Metadata
) -> list[pb.GenerateResponse]:
    """In the order of the requests. Where one fails the others are ended; raises its NeoflexError."""
    tasks = [asyncio.create_task(planner.generate(request, metadata)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
