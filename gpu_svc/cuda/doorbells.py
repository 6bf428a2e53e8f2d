"""Doorbells by the device's stream: the executor's thread only enqueues, and the device rings and waits by itself.

    main stream                 out stream                            back stream
    pre_attention          ──►  q, k, v into the slot, submitted = n
    whatever is next                                                  until completed >= n, out from the slot
    post_attention         ◄────────────────────────────────────────

A slot's numbers are 1, 2, ... in every iteration, so that captured operations stay right. A device that waits can't see
that its peer has died: `Guard` looks for it, and lets the device go on.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from svc_common.tensor_plane import Outcome, TensorPlane

NUM_SLOTS = 2
_LOOK_S = 0.02
"""Between two looks at the peer, while the device may be waiting."""

logger = logging.getLogger(__name__)

Copies = Sequence[tuple[Tensor, Tensor]]
"""(target, source) of equal shapes and types."""


class StreamOperations(Protocol):
    """What a device does for one region, slot by slot in the order of the calls; `word` is the address of 32 bits."""

    def begin(self) -> None:
        """Of an iteration, which may be captured, eager, or the replay of one that was captured."""
        ...

    def send(self, slot: int, copies: Copies, word: int, value: int) -> None:
        """Once the main stream has done what it was told so far: copies to host memory, then writes the word."""
        ...

    def fetch(self, slot: int, word: int, value: int, target: Tensor, source: Tensor) -> None:
        """Waits until the word has reached `value`, then copies; the main stream waits for that, nobody else.

        "Reached": at most half the circle of 32 bits ahead.
        """
        ...

    def finish(self) -> int:
        """Returns once the main stream has what was fetched: nanoseconds that it waited for it since the last time."""
        ...

    def close(self) -> None:
        """Returns once nothing of it runs any more."""
        ...


class StreamDoorbells:
    """Of one region. Methods belong to the executor's thread."""

    def __init__(self, plane: TensorPlane, operations: StreamOperations, address: int, timeout_s: float) -> None:
        """`address`: of the region's first byte, as `operations` take addresses. `timeout_s`: for each answer."""
        self.wait_ns = 0
        """That the main stream has waited so far, as far as iterations are finished."""
        self._plane = plane
        self._operations = operations
        self._guard = Guard(plane, timeout_s)
        self._timeout_s = timeout_s
        self._words = [[address + offset for offset in plane.word_offsets(slot)] for slot in range(NUM_SLOTS)]
        self._numbers = [0] * NUM_SLOTS

    def begin(self) -> None:
        """Of an iteration whose descriptor says that a device rings."""
        self._numbers = [0] * NUM_SLOTS
        self._operations.begin()
        self._guard.watch()

    def submit(self, slot: int, copies: Copies) -> None:
        """The slot's next layer, once `copies` have put it there."""
        self._numbers[slot] += 1
        self._operations.send(slot, copies, self._words[slot][0], self._numbers[slot])

    def wait(self, slot: int, target: Tensor, source: Tensor) -> None:
        """For the answer to the last submit, which is then copied."""
        self._operations.fetch(slot, self._words[slot][1], self._numbers[slot], target, source)

    def finish(self) -> None:
        """Ends an iteration, once the device has all answers. Raises PlaneError where there won't be any."""
        self.wait_ns += self._operations.finish()
        outcome = self._guard.rest()
        if outcome is not Outcome.COMPLETED:
            self._plane.raise_for(outcome, self._timeout_s)

    def close(self) -> None:
        """Lets the device go on, wherever it is, and returns once it needs the region no more."""
        self._guard.give_up()
        self._operations.close()
        self._guard.close()


class Guard:
    """A thread that looks after the peer while a device may wait for it, whatever the executor's thread does."""

    def __init__(self, plane: TensorPlane, timeout_s: float) -> None:
        self._plane = plane
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._watches = self._closed = False
        self._num_watches = 0
        self._outcome = Outcome.COMPLETED
        self._thread = threading.Thread(target=self._run, name="device-guard", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """From now on, until `rest`."""
        with self._changed:
            self._watches, self._outcome = True, Outcome.COMPLETED
            self._num_watches += 1
            self._changed.notify()

    def rest(self) -> Outcome:
        """Why the device was let go on without an answer; COMPLETED where it was not."""
        with self._changed:
            self._watches = False
            return self._outcome

    def give_up(self) -> None:
        """No answer is wanted any more: the device is let go from now on."""
        with self._changed:
            self._watches, self._outcome = True, Outcome.PEER_LOST
            self._plane.release_device()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        progress: tuple[object, ...] = ()
        since_s = 0.0
        while True:
            with self._changed:
                while not self._watches and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._changed.wait(_LOOK_S)
                if not self._watches:
                    continue
                if self._outcome is not Outcome.COMPLETED:
                    # Again: a worker that goes on after all may have written over it.
                    self._plane.release_device()
                    continue
                numbers = [self._plane.numbers(slot) for slot in range(NUM_SLOTS)]
                before, progress = progress, (self._num_watches, *numbers)
                # A device that computes for long is owed nothing meanwhile.
                if progress != before or all(submitted == completed for submitted, completed in numbers):
                    since_s = time.monotonic()
                outcome = self._plane.outlook()
                if outcome is Outcome.COMPLETED and time.monotonic() - since_s > self._timeout_s:
                    outcome = Outcome.TIMED_OUT
                if outcome is not Outcome.COMPLETED:
                    self._outcome = outcome
                    self._plane.release_device()
