"""Times a piece of work on a device, undisturbed as far as repeating it helps."""

import time
from collections.abc import Callable

import torch

# A piece is repeated until it has cost this much, but at least _MIN_RUNS and at most _MAX_RUNS times.
_ENOUGH_S = 0.02
_MIN_RUNS, _MAX_RUNS = 3, 15
LONG_S = 0.05
"""A piece this long is run twice only."""


class Stopwatch:
    """For work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def least_s(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """The least of several runs: what disturbs a measurement only ever adds. `before` precedes each, untimed."""
        before()
        first_s = self._seconds(run)  # Kernels are chosen and buffers made on the first call.
        if first_s > LONG_S:
            before()
            return min(first_s, self._seconds(run))
        times: list[float] = []
        while len(times) < _MIN_RUNS or (sum(times) < _ENOUGH_S and len(times) < _MAX_RUNS):
            before()
            times.append(self._seconds(run))
        return min(times)

    def _seconds(self, run: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def since_now(device: torch.device) -> Callable[[], int]:
    """Returns nanoseconds from when the device has done all that it was told before, until it has done all that it was
    told by then; waits for that. On a CPU that is the thread's own time.
    """
    if device.type != "cuda":
        start_ns = time.perf_counter_ns()
        return lambda: time.perf_counter_ns() - start_ns
    from gpu_svc.cuda.events import make_wait, nanoseconds  # Only device cuda needs it.

    before, after = make_wait()
    before.record()

    def elapsed_ns() -> int:
        after.record()
        after.synchronize()
        return nanoseconds(before, after)

    return elapsed_ns
