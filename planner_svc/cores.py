"""Decides how many threads attend on the CPU: more while the executor waits for them, fewer while they idle.

No I/O and no clock: CoreKeeper feeds it with what iterations took and carries out what it decides.

A change is predicted first: n threads that become m do the same attention in n/m of the time at best. After one upward
the attention that a second brings is compared with that before, and where it did not rise the change is taken back.
"""

import math
from dataclasses import dataclass

from planner_svc.thread_scaling import ThreadScaling

_WINDOW_S = 2.0
"""Least time between two changes: each is judged by what was seen in between."""
_MIN_ITERATIONS = 16
"""With attention on the CPU, before anything is concluded from them."""
_STALE_ITERATIONS = 3
"""After a change: planned before it, or taking the threads in."""
_IDLE_S = 5.0
"""Without attention on the CPU: nobody needs the threads."""
_WORTHWHILE = 0.08
"""Grow where that promises to save this share of the iterations' time."""
_QUIET = 0.04
"""Waits below this share say nothing: the way to the CPU and back costs that much without any attention."""
_HIDDEN = 0.7
"""Shrink where attention would still take at most this part of what makes it the bottleneck."""
_FULFILLED = 0.25
"""Of the predicted gain that must show, or the change is taken back."""
_BUSY = 0.5
"""Share of the iterations' time. A CPU that works less does not hold back the sequences that were left out."""
_LEFT_OUT = 0.1
"""Share of the host's sequences."""
_FIRST_RETRY_S, _LAST_RETRY_S = 60.0, 960.0
"""What did not help is tried again after so long, twice as long each time."""
_REMEMBER_S = 600.0
"""How long it is remembered under what load so many threads were too few."""


@dataclass(frozen=True, slots=True)
class ThreadLimits:
    least: int
    most: int | None
    """None: as many as the service allows."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One iteration."""

    total_s: float
    cpu_wait_s: float
    """The executor waited for attention on the CPU."""
    cpu_attention_s: float
    """The CPU attended."""
    cpu_tokens: int
    """Context tokens attended on the CPU."""
    num_attended: int
    """Sequences with their KV on the host that were in it."""
    num_left_out: int
    """Sequences with their KV on the host that were not."""


@dataclass(frozen=True, slots=True)
class Change:
    num_threads: int
    reason: str


@dataclass(slots=True)
class _Window:
    """Sums over iterations with attention on the CPU."""

    start_s: float
    num_iterations: int = 0
    total_s: float = 0.0
    wait_s: float = 0.0
    cpu_s: float = 0.0
    num_tokens: int = 0
    num_attended: int = 0
    num_left_out: int = 0

    def add(self, sample: Sample) -> None:
        self.num_iterations += 1
        self.total_s += sample.total_s
        self.wait_s += sample.cpu_wait_s
        self.cpu_s += sample.cpu_attention_s
        self.num_tokens += sample.cpu_tokens
        self.num_attended += sample.num_attended
        self.num_left_out += sample.num_left_out

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.total_s

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.total_s

    @property
    def leaves_out(self) -> bool:
        """The CPU is too slow for sequences that could use it."""
        is_busy = self.cpu_share >= _BUSY
        return is_busy and self.num_left_out > _LEFT_OUT * (self.num_attended + self.num_left_out)

    @property
    def tokens_per_s(self) -> float:
        """Attended in a second of the executor: what more threads are to raise."""
        return self.num_tokens / self.total_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Attended in a second of attention: how fast the threads are."""
        return self.num_tokens / self.cpu_s


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change whose effect is still to be seen."""

    num_before: int
    before: _Window
    least_tokens_per_s: float = 0.0
    """Else it is taken back; 0: it stays."""


class CoreController:
    """Times are seconds of the caller's clock, and never go back."""

    def __init__(self, limits: ThreadLimits | None) -> None:
        """`limits` None: the number of threads is left alone, and only its effect is followed."""
        self._limits = limits
        self._num_threads = 0
        self._most = 0
        """That the service allows."""
        self._window = _Window(0.0)
        self._num_stale = 0
        self._last_cpu_s = 0.0
        """When the CPU attended last, or the threads changed."""
        self._trial: _Trial | None = None
        self._ceiling = 0
        """More did not help; holds until _ceiling_until_s."""
        self._ceiling_until_s = -math.inf
        self._retry_s = _FIRST_RETRY_S
        self._too_few: dict[int, tuple[float, float]] = {}
        """By number of threads: the CPU's share of the time with which they were the bottleneck, and when to forget."""
        self._scaling = ThreadScaling()

    @property
    def num_threads(self) -> int:
        """As last seen; 0 before."""
        return self._num_threads

    @property
    def limits(self) -> tuple[int, int] | None:
        """Least and most threads; None where their number is left alone, or the service is not known yet."""
        if self._limits is None or self._most == 0:
            return None
        most = min(self._limits.most or self._most, self._most)
        return min(self._limits.least, most), most

    @property
    def cpu_scale(self) -> float:
        """Multiply the seconds of attention on the CPU by this: they were measured with another number of threads."""
        return self._scaling.factor(self._num_threads) if self._num_threads else 1.0

    def measured_with(self, num_threads: int) -> None:
        """The estimator's tables are new."""
        self._scaling = ThreadScaling(num_threads)

    def note(self, num_threads: int, most_threads: int, now: float) -> None:
        """What the service says: its threads, which others may have changed, and the most it allows."""
        self._most = most_threads
        if num_threads != self._num_threads:
            trial = None
            if self._num_threads and self._window.num_iterations >= _MIN_ITERATIONS:
                trial = _Trial(self._num_threads, self._window)
            self._begin(num_threads, trial, now)

    def observe(self, sample: Sample, now: float) -> None:
        if sample.cpu_tokens <= 0 or sample.cpu_attention_s <= 0 or sample.total_s <= 0:
            return
        self._last_cpu_s = now
        if self._num_stale:
            self._num_stale -= 1
        else:
            self._window.add(sample)

    def decide(self, now: float) -> Change | None:
        """The number of threads to set now, if another. Ask every second or so; `done` tells that it was set."""
        limits = self.limits
        if now - self._last_cpu_s >= _IDLE_S:
            self._window, self._trial = _Window(now), None
            self._last_cpu_s = now
            return self._clamped(limits) or self._idle(limits)
        window = self._window
        if window.num_iterations < _MIN_ITERATIONS or now - window.start_s < _WINDOW_S:
            return self._clamped(limits)
        trial, self._trial = self._trial, None
        change = self._judge(trial, window, now) if trial else None
        if limits is not None:
            change = self._clamped(limits) or change or self._grow(limits, window, now) or self._shrink(limits, now)
        if change is None:
            self._window = _Window(now)
        return change

    def done(self, change: Change, now: float) -> None:
        """It was set; what comes now is compared with what was before."""
        window, trial = self._window, None
        if window.num_iterations >= _MIN_ITERATIONS:
            least = 0.0
            if change.num_threads > self._num_threads:
                saved = self._saved_share(change.num_threads, window)
                least = window.tokens_per_s * (1 + _FULFILLED * saved / (1 - saved))
            trial = _Trial(self._num_threads, window, least)
        self._begin(change.num_threads, trial, now)

    def _begin(self, num_threads: int, trial: _Trial | None, now: float) -> None:
        self._num_threads = num_threads
        self._trial = trial
        self._window = _Window(now)
        self._num_stale = _STALE_ITERATIONS
        self._last_cpu_s = now

    # --- rules

    def _clamped(self, limits: tuple[int, int] | None) -> Change | None:
        if limits is None or limits[0] <= self._num_threads <= limits[1]:
            return None
        return Change(min(max(self._num_threads, limits[0]), limits[1]), f"limits are {limits[0]} and {limits[1]}")

    def _idle(self, limits: tuple[int, int] | None) -> Change | None:
        if limits is None or self._num_threads <= limits[0]:
            return None
        return Change(max(limits[0], self._num_threads // 2), f"no attention on the CPU for {_IDLE_S:g} s")

    def _judge(self, trial: _Trial, window: _Window, now: float) -> Change | None:
        """What a change has brought; the way back where that is too little."""
        self._scaling.learn(
            trial.num_before, self._num_threads, trial.before.tokens_per_cpu_s / window.tokens_per_cpu_s
        )
        if trial.least_tokens_per_s == 0:
            return None
        if window.tokens_per_s >= trial.least_tokens_per_s:
            self._retry_s = _FIRST_RETRY_S
            return None
        # Between the two there may be a number that helps.
        self._ceiling = (trial.num_before + self._num_threads) // 2
        self._ceiling_until_s = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        gain = window.tokens_per_s / trial.before.tokens_per_s - 1
        return Change(trial.num_before, f"{self._num_threads} brought {gain:+.0%} attention per second")

    def _grow(self, limits: tuple[int, int], window: _Window, now: float) -> Change | None:
        n = self._num_threads
        most = min(2 * n, limits[1], self._ceiling if now < self._ceiling_until_s else limits[1])
        if most <= n:
            return None
        if window.leaves_out:
            wanted = n * (1 + window.num_left_out / window.num_attended) if window.num_attended else 2 * n
            reason = f"{window.num_left_out / window.num_iterations:.1f} sequences an iteration are left out"
        else:
            wanted = n * window.cpu_s / (window.cpu_s - window.wait_s) if window.cpu_s > window.wait_s else 2 * n
            reason = f"the executor waits {window.wait_share:.0%} of its time for attention on the CPU"
        num_threads = min(max(math.ceil(wanted), n + 1), most)
        if self._saved_share(num_threads, window) < _WORTHWHILE:
            return None
        self._too_few[n] = (window.cpu_share, now + _REMEMBER_S)
        return Change(num_threads, reason)

    def _saved_share(self, num_threads: int, window: _Window) -> float:
        """Of the iterations' time, at best; below 1."""
        saved_s = window.cpu_s * (1 - self._num_threads / num_threads)
        return min(saved_s if window.leaves_out else min(saved_s, window.wait_s), 0.5 * window.total_s) / window.total_s

    def _shrink(self, limits: tuple[int, int], now: float) -> Change | None:
        n, window = self._num_threads, self._window
        for num_threads in range(max(limits[0], (n + 1) // 2), n):
            share = window.cpu_share * n / num_threads
            too_much, until_s = self._too_few.get(num_threads, (1.0, now))
            is_hidden = share <= _HIDDEN * (too_much if now < until_s else 1.0)
            is_quiet = window.wait_share < _QUIET and not window.leaves_out
            if share < _QUIET or (is_hidden and is_quiet):
                return Change(num_threads, f"the CPU attends {window.cpu_share:.0%} of the time, nobody waits for it")
        return None
