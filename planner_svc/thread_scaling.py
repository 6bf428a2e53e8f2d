"""How the time of attention on the CPU follows the number of threads, learnt from changes; under CoreController."""


class ThreadScaling:
    """Seconds of attention by number of threads, as a factor on what was measured with `num_measured`."""

    def __init__(self, num_measured: int = 0) -> None:
        """0: nothing was measured, so there is nothing to scale."""
        self._num_measured = num_measured
        self._factors = {num_measured: 1.0}

    def factor(self, num_threads: int) -> float:
        """As seen; else as if each thread brought as much as those of the next smaller number that was seen."""
        if self._num_measured == 0:
            return 1.0
        seen = max((n for n in self._factors if n <= num_threads), default=min(self._factors))
        return self._factors[seen] * seen / num_threads

    def learn(self, num_before: int, num_threads: int, ratio: float) -> None:
        """Attention took `ratio` times as long with `num_threads` as with `num_before`."""
        if num_threads == self._num_measured:
            return
        # More threads are never slower, nor faster than their number says: the rest is another load.
        ideal = self._num_measured / num_threads
        seen = min(max(self.factor(num_before) * ratio, min(1.0, ideal)), max(1.0, ideal))
        before = self._factors.get(num_threads, seen)
        self._factors[num_threads] = (before + seen) / 2
