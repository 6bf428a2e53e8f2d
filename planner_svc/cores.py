"""Decides how many threads attend on the CPU: more while the executor waits for them, fewer while they idle.

No I/O and no clock: CoreKeeper feeds it with what iterations took and carries out what it decides.

A change is predicted first: n threads that become m do the same attention in n/m of the time at best. After one upward
the attention that a second brings is compared with that before, and where it did not rise the change is taken back.
"""

import math
from dataclasses import dataclass

from planner_svc.cpu_load import Sample, Window
from planner_svc.thread_scaling import ThreadScaling

_WINDOW_S = 2.0
"""Least time between two changes: each is judged by what was seen in between."""
_MIN_ITERATIONS = 8
"""With attention on the CPU, before anything is concluded from them."""
_DOUBTFUL = 48
"""Iterations before a change is taken back, unless the loss is gross."""
_GROSS_LOSS = 0.85
"""Of the attention per second."""
_STALE_ITERATIONS = 3
"""After a change: planned before it, or taking the threads in."""
_IDLE_S = 5.0
"""Without attention on the CPU: nobody needs the threads."""
_WORTHWHILE = 0.08
"""Grow where that promises to save this share of the iterations' time."""
_QUIET = 0.04
"""Waits below this share say nothing: the way to the CPU and back costs that much without any attention."""
_HIDDEN = 0.7
"""Shrink where attention would still take at most this part of what the executor's own work hides."""
_FULFILLED = 0.25
"""Of the predicted gain that must show, or the change is taken back."""
_NEARLY = 0.1
"""Of a thread: not worth another."""
_FIRST_RETRY_S, _LAST_RETRY_S = 60.0, 960.0
"""What did not help is tried again after so long, twice as long each time."""
_REMEMBER_S = 1800.0
"""How long it is remembered how much is hidden."""


@dataclass(frozen=True, slots=True)
class ThreadLimits:
    least: int
    most: int | None
    """None: as many as the service allows."""


@dataclass(frozen=True, slots=True)
class Change:
    num_threads: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change whose effect is still to be seen."""

    num_before: int
    before: Window
    least_tokens_per_s: float = 0.0
    """Else it is taken back; 0: it stays."""

    def is_open(self, window: Window) -> bool:
        """Too little was gained, but it may be chance."""
        is_bad = window.tokens_per_s < _GROSS_LOSS * self.before.tokens_per_s
        return window.tokens_per_s < self.least_tokens_per_s and window.num_iterations < _DOUBTFUL and not is_bad


class CoreController:
    """Times are seconds of the caller's clock, and never go back."""

    def __init__(self, limits: ThreadLimits | None) -> None:
        """`limits` None: the number of threads is left alone, and only its effect is followed."""
        self._limits = limits
        self._num_threads = 0
        self._most = 0
        """That the service allows."""
        self._window = Window(0.0)
        self._complete: Window | None = None
        """The latest with as many iterations as it takes, of the same threads."""
        self._num_stale = 0
        self._last_cpu_s = 0.0
        """When the CPU attended last, or the threads changed."""
        self._trial: _Trial | None = None
        self._ceiling = 0
        """More did not help; one more is tried after _ceiling_until_s. 0: none."""
        self._ceiling_until_s = -math.inf
        self._retry_s = _FIRST_RETRY_S
        self._hidden_share = 1.0
        """Seconds of attention beside which a second of the executor's own work goes on unhindered, as last seen."""
        self._hidden_until_s = -math.inf
        """1 from then on."""
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
            # Not the latest iterations: the change may be older than the news of it.
            self._begin(num_threads, _Trial(self._num_threads, self._complete) if self._complete else None, now)

    def observe(self, sample: Sample, now: float) -> None:
        if sample.cpu_tokens <= 0 or sample.cpu_attention_s <= 0 or sample.total_s <= 0:
            return
        self._last_cpu_s = now
        if self._num_stale:
            self._num_stale -= 1
        else:
            self._window.add(sample)

    def decide(self, now: float, is_attending: bool) -> Change | None:
        """The number of threads to set now, if another. Ask every second or so; `done` tells that it was set.

        `is_attending`: an iteration with attention on the CPU is under way.
        """
        limits, window = self.limits, self._window
        if is_attending:
            self._last_cpu_s = now
        elif now - self._last_cpu_s >= _IDLE_S:
            self._begin(self._num_threads, None, now)
            return self._clamped(limits) or self._idle(limits)
        if window.num_iterations < _MIN_ITERATIONS or now - window.start_s < _WINDOW_S:
            return self._clamped(limits)
        if self._trial and self._trial.is_open(window):
            return self._clamped(limits)
        trial, self._trial = self._trial, None
        self._complete, self._window = window, Window(now)
        change = self._judge(trial, window, now) if trial else None
        if limits is not None:
            change = (
                self._clamped(limits) or change or self._grow(limits, window, now) or self._shrink(limits, window, now)
            )
        return change

    def done(self, change: Change, now: float) -> None:
        """It was set; what comes now is compared with what was before."""
        window, trial = self._complete, None
        if window:
            least = 0.0
            if change.num_threads > self._num_threads:
                saved = self._saved_share(change.num_threads, window)
                least = window.tokens_per_s * (1 + _FULFILLED * saved / (1 - saved))
            trial = _Trial(self._num_threads, window, least)
        self._begin(change.num_threads, trial, now)

    def _begin(self, num_threads: int, trial: _Trial | None, now: float) -> None:
        self._num_threads = num_threads
        self._trial = trial
        self._window = Window(now)
        self._complete = None
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

    def _judge(self, trial: _Trial, window: Window, now: float) -> Change | None:
        """What a change has brought; the way back where that is too little."""
        self._scaling.learn(
            trial.num_before, self._num_threads, trial.before.tokens_per_cpu_s / window.tokens_per_cpu_s
        )
        if trial.least_tokens_per_s == 0:
            return None
        if window.tokens_per_s >= trial.least_tokens_per_s:
            if self._num_threads > self._ceiling:
                self._ceiling, self._retry_s = 0, _FIRST_RETRY_S
            return None
        # Between the two there may be a number that helps.
        self._ceiling = (trial.num_before + self._num_threads) // 2
        self._ceiling_until_s = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        gain = window.tokens_per_s / trial.before.tokens_per_s - 1
        return Change(trial.num_before, f"{self._num_threads} brought {gain:+.0%} attention per second")

    def _grow(self, limits: tuple[int, int], window: Window, now: float) -> Change | None:
        n = self._num_threads
        most = min(2 * n, limits[1])
        if self._ceiling:
            most = min(most, self._ceiling + (now >= self._ceiling_until_s))
        if most <= n:
            return None
        if window.leaves_out:
            wanted = n * (1 + window.num_left_out / window.num_attended) if window.num_attended else 2 * n
            reason = f"{window.num_left_out / window.num_iterations:.1f} sequences an iteration are left out"
        else:
            wanted = n * window.cpu_s / (window.cpu_s - window.wait_s) if window.cpu_s > window.wait_s else 2 * n
            reason = f"the executor waits {window.wait_share:.0%} of its time for attention on the CPU"
        num_threads = min(max(math.ceil(wanted - _NEARLY), n + 1), most)
        if self._saved_share(num_threads, window) < _WORTHWHILE:
            return None
        self._hidden_share, self._hidden_until_s = window.hidden_share, now + _REMEMBER_S
        return Change(num_threads, reason)

    def _saved_share(self, num_threads: int, window: Window) -> float:
        """Of the iterations' time, at best; below 1."""
        saved_s = window.cpu_s * (1 - self._num_threads / num_threads)
        return min(saved_s if window.leaves_out else min(saved_s, window.wait_s), 0.5 * window.total_s) / window.total_s

    def _shrink(self, limits: tuple[int, int], window: Window, now: float) -> Change | None:
        n = self._num_threads
        is_quiet = window.wait_share < _QUIET and not window.leaves_out
        if is_quiet:  # So much is hidden, at least.
            self._hidden_share = max(self._hidden_share, window.hidden_share)
        hidden_share = self._hidden_share if now < self._hidden_until_s else 1.0
        for num_threads in range(max(limits[0], (n + 1) // 2), n):
            share = window.cpu_share * n / num_threads
            if share < _QUIET or (is_quiet and share <= _HIDDEN * hidden_share):
                return Change(num_threads, f"the CPU attends {window.cpu_share:.0%} of the time, nobody waits for it")
        return None
