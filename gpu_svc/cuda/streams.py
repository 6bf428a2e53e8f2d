"""Copies and doorbells on streams of the device's own, and the tests at start of whether that can be had."""

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from gpu_svc.cuda import driver
from gpu_svc.cuda.doorbells import NUM_SLOTS, Copies
from gpu_svc.cuda.events import Wait, is_done, make_event, make_wait, nanoseconds
from gpu_svc.cuda.pinned import Pinned
from gpu_svc.cuda.swaps import Arrival

_TEST_S = 2.0
"""For what takes microseconds."""
_RELEASE_S = 3 * _TEST_S
"""Longer than all of a test takes that is not held up."""
_AWAITED = 64
"""Offset in the test's page of the word that is awaited: another cache line than the one that is written."""

logger = logging.getLogger(__name__)


class CudaOperations:
    """`StreamOperations`. Copies to the host have one stream and copies back another: neither waits for the other.

    All that words order is ordered by events as well, as the driver demands and as a capture needs; and each wait is
    for what was enqueued before it, so that streams may share a queue of the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = make_stream(device), make_stream(device)
        self._ready, self._sent, self._fetched = ([make_event() for _ in range(NUM_SLOTS)] for _ in range(3))
        self._waits: list[Wait] = []
        """Of the main stream; kept from one iteration to the next."""
        self._num_waits = 0
        self._captured_waits: dict[int, list[Wait]] = {}
        """By the number of the iteration in which they were captured, which a replay writes to this word:"""
        self._replayed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._replayed_address = driver.device_address(self._replayed.data_ptr())
        self._num_begun = 0

    def begin(self) -> None:
        self._num_begun += 1
        self._num_waits = 0
        self._replayed.zero_()

    def send(self, slot: int, copies: Copies, word: int, value: int) -> None:
        self._ready[slot].record()
        self._out.wait_event(self._ready[slot])
        with torch.cuda.stream(self._out):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        driver.write_word(self._out.cuda_stream, word, value)
        self._sent[slot].record(self._out)

    def fetch(self, slot: int, word: int, value: int, target: Tensor, source: Tensor) -> None:
        self._back.wait_event(self._sent[slot])
        driver.wait_word(self._back.cuda_stream, word, value)
        with torch.cuda.stream(self._back):
            target.copy_(source, non_blocking=True)
        before, after = self._next_wait()
        self._fetched[slot].record(self._back)
        before.record()
        self._fetched[slot].wait()
        after.record()

    def finish(self) -> int:
        if self._num_waits:
            self._waits[self._num_waits - 1][1].synchronize()
            return sum(nanoseconds(*wait) for wait in self._waits[: self._num_waits])
        torch.cuda.current_stream(self._device).synchronize()
        try:
            return sum(nanoseconds(*wait) for wait in self._captured_waits.get(int(self._replayed), ()))
        except RuntimeError as error:
            logger.warning("waits in replays are not known: %s", error)
            self._captured_waits.clear()
            return 0

    def close(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:  # A device that has failed does nothing any more.
            logger.warning("the device failed: %s", error)

    def _next_wait(self) -> Wait:
        if torch.cuda.is_current_stream_capturing():
            waits = self._captured_waits.setdefault(self._num_begun, [])
            if not waits:
                driver.write_word(self._back.cuda_stream, self._replayed_address, self._num_begun)
            waits.append(make_wait(in_replays=True))
            return waits[-1]
        if self._num_waits == len(self._waits):
            self._waits.append(make_wait())
        self._num_waits += 1
        return self._waits[self._num_waits - 1]


class CudaQueue:
    """`CopyQueue`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = make_stream(device)
        self._device = device

    def follow_main(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def follow(self, arrival: Arrival) -> None:
        assert isinstance(arrival, torch.cuda.Event)
        self._stream.wait_event(arrival)

    def run(self, copy: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            copy()

    def mark(self) -> Arrival:
        event = make_event()
        event.record(self._stream)
        return event


def make_stream(device: torch.device) -> torch.cuda.Stream:
    """For copies: what is on it goes before kernels that wait for a place on the device."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def can_ring(device: torch.device) -> bool:
    """Whether the device's streams can write and await words in pinned host memory; says so in the log, once."""
    with _one_trial:
        return _chosen("doorbells of CPU attention", device, _try_words if driver.bindings() else None)


def can_address(device: torch.device) -> bool:
    """Whether the device's kernels read and write pinned host memory rightly; says so in the log, once."""
    with _one_trial:
        return _chosen("swaps of KV", device, _try_views)


_one_trial = threading.Lock()
"""Regions are given to a device by several threads, and one trial's kernels, as they load, would wait for the other."""


@cache
def _chosen(what: str, device: torch.device, attempt: Callable[[torch.device, Pinned], str] | None) -> bool:
    """`attempt` says what does not work in a page of pinned memory, if anything; None: it can't be tried."""
    why_not = _why_not(device, attempt) if attempt else "cuda-bindings cannot be used"
    if why_not:
        logger.info("%s: by the executor's thread (%s)", what, why_not)
    else:
        logger.info("%s: by the device's streams", what)
    return not why_not


def _why_not(device: torch.device, attempt: Callable[[torch.device, Pinned], str]) -> str:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    try:
        driver.enter(device)
        driver.register(address, len(page), driver.PORTABLE | driver.MAPPED)
        why_not = attempt(device, Pinned(address, len(page), device))
        if not why_not:
            driver.unregister(address)
    except Exception as error:  # Whatever it is: there is another way.
        why_not = f"{type(error).__name__}: {error}"
    if why_not:
        _kept.append(page)  # The device may still look at it.
    return why_not


_kept: list[mmap.mmap] = []


def _try_views(device: torch.device, pinned: Pinned) -> str:
    """Blocks from the device to the page and back."""
    page = torch.frombuffer((ctypes.c_uint8 * pinned.num_bytes).from_address(pinned.address), dtype=torch.uint8)
    blocks = pinned.view(page.view(torch.int64)[:96].view(3, 32))
    rows = torch.tensor([2, 0], device=device)
    sent = torch.arange(64, device=device).view(2, 32)
    blocks.index_copy_(0, rows, sent)
    back = blocks.index_select(0, rows.flip(0))
    torch.cuda.synchronize(device)
    here = page.view(torch.int64)[:96].view(3, 32)
    if not torch.equal(here[[2, 0]], torch.arange(64).view(2, 32)):
        return "what a kernel writes to host memory is not there"
    return "" if torch.equal(back, sent.flip(0)) else "a kernel reads something else from host memory"


def _try_words(device: torch.device, pinned: Pinned) -> str:
    """A wait that the device does not end is let go by its word, also where this thread stands still meanwhile."""
    written, awaited = (ctypes.c_uint32.from_address(pinned.address + offset) for offset in (0, _AWAITED))
    stream, done = make_stream(device), make_event()
    base = pinned.device_address
    main = torch.cuda.current_stream(device)
    # Loading a kernel may wait for the whole device: all of them have run before anything waits.
    _ = (torch.ones(64, device=device) * 2).sum() + (torch.ones(64, device=device) * 3).sum()
    release = threading.Timer(_RELEASE_S, lambda: setattr(awaited, "value", 5))
    release.daemon = True
    stream.wait_stream(main)
    release.start()
    driver.write_word(stream.cuda_stream, base, 7)
    driver.wait_word(stream.cuda_stream, base + _AWAITED, 3)
    with torch.cuda.stream(stream):
        target = torch.ones(64, device=device) * 2
    done.record(stream)
    beside = make_event()
    computed = torch.ones(64, device=device) * 3
    beside.record(main)
    why_not = ""
    if not _within(lambda: written.value == 7):
        why_not = "a written word does not arrive"
    elif not _within(lambda: is_done(beside)):
        why_not = "a stream that waits holds up another"
    elif is_done(done):
        why_not = "a stream does not wait for a word"
    release.cancel()
    awaited.value = 5  # More than is waited for is enough.
    if not _within(lambda: is_done(done)):
        why_not = why_not or "a stream does not see a word that is written"
    elif not why_not and float(target.sum() + computed.sum()) != 64 * 5:
        why_not = "a stream computes wrongly after a wait"
    return why_not


def _within(holds: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + _TEST_S
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.0005)
    return True
