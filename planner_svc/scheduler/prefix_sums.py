"""Tokens by the time at which they are due, and how many are due before a time: a sparse Fenwick tree."""

_TICKS_PER_S = 64
_NUM_TICKS = 2**48
"""Longer than any clock counts: 140,000 years."""


class DueTokens:
    """Each operation takes some 48 steps, whatever is held."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}
        self.total = 0

    def add(self, due_s: float, num_tokens: int) -> None:
        """Negative to take away."""
        self.total += num_tokens
        tick = _tick(due_s)
        while tick <= _NUM_TICKS:
            value = self._sums.get(tick, 0) + num_tokens
            if value:
                self._sums[tick] = value
            else:
                del self._sums[tick]
            tick += tick & -tick

    def before(self, due_s: float) -> int:
        """Tokens due by then, to the tick."""
        tick, total = _tick(due_s), 0
        while tick:
            total += self._sums.get(tick, 0)
            tick &= tick - 1
        return total


def _tick(due_s: float) -> int:
    return min(_NUM_TICKS, max(0, int(due_s * _TICKS_PER_S)) + 1)
