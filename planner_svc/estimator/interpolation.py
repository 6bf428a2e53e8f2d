"""Monotone interpolation over measured points, in one and two dimensions; under TableEstimator.

More work never takes less time, and what disturbs a measurement only adds: where more work was measured to take less,
that holds for less work, too. Below the first point the first value holds (a fixed cost remains); beyond the last one
the last slope goes on.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, pairwise


class Curve:
    """Seconds over one quantity: piecewise linear, never negative, never falling."""

    def __init__(self, points: Iterable[tuple[float, float]], last_slope: float | None = None) -> None:
        """`points` are (x, seconds), at least one. `last_slope` replaces the slope of the last segment beyond it."""
        merged: dict[float, float] = {}
        for x, seconds in points:
            merged[x] = min(merged.get(x, seconds), seconds)
        if not merged:
            raise ValueError("a curve needs at least one point")
        self.xs = sorted(merged)
        self.values = list(accumulate((merged[x] for x in reversed(self.xs)), min))[::-1]
        slopes = [
            (high - low) / (right - left)
            for (left, right), (low, high) in zip(pairwise(self.xs), pairwise(self.values), strict=True)
        ]
        if last_slope is None:
            last_slope = slopes[-1] if slopes else 0.0
        self._slopes = [*slopes, max(0.0, last_slope)]

    @property
    def last_slope(self) -> float:
        """Seconds per unit beyond the last point."""
        return self._slopes[-1]

    def __call__(self, x: float) -> float:
        index = bisect_right(self.xs, x) - 1
        if index < 0:
            return self.values[0]
        return self.values[index] + self._slopes[index] * (x - self.xs[index])


class Surface:
    """Seconds over two quantities: bilinear on the grid of all measured x and y, never falling along either.

    Rows need not have the same y's: a row is interpolated, or extended by its last slope, where another was measured.
    """

    def __init__(self, points: Iterable[tuple[float, float, float]], per_x: bool = False) -> None:
        """`points` are (x, y, seconds), at least one, x above 0.

        `per_x`: what is linear between measured x's is seconds / x, as where each of x tokens sees all before it.
        """
        by_x: defaultdict[float, list[tuple[float, float]]] = defaultdict(list)
        for x, y, seconds in points:
            by_x[x].append((y, seconds))
        if not by_x:
            raise ValueError("a surface needs at least one point")
        self._per_x = per_x
        self._xs = sorted(by_x)
        ys = sorted({y for row in by_x.values() for y, _ in row})
        measured = [Curve(by_x[x]) for x in self._xs]
        values = [[row(y) for y in ys] for row in measured]
        for index in range(len(values) - 2, -1, -1):
            # Only where more was measured: an extension is a guess.
            num = bisect_right(ys, measured[index + 1].xs[-1])
            for i in range(num):
                values[index][i] = min(values[index][i], values[index + 1][i])
        self._rows: list[Curve] = []
        for index, row in enumerate(measured):
            slope = row.last_slope
            if self._rows:
                below = self._rows[-1]
                values[index] = [max(pair) for pair in zip(values[index], below.values, strict=True)]
                slope = max(slope, below.last_slope)
            self._rows.append(Curve(zip(ys, values[index], strict=True), slope))
        self._slope_beyond = self._slope_beyond_last_row(ys)

    def _slope_beyond_last_row(self, ys: list[float]) -> Curve:
        """Seconds per unit of x beyond the last row, over y."""
        if len(self._rows) == 1:
            return Curve([(ys[0], 0.0)])
        before, last = self._rows[-2:]
        width = self._xs[-1] - self._xs[-2]
        slopes = [(high - low) / width for low, high in zip(before.values, last.values, strict=True)]
        return Curve(zip(ys, slopes, strict=True), (last.last_slope - before.last_slope) / width)

    def __call__(self, x: float, y: float) -> float:
        index = bisect_right(self._xs, x) - 1
        if index < 0:
            return self._rows[0](y)
        low = self._rows[index](y)
        past = x - self._xs[index]
        if past == 0:
            return low
        if index == len(self._rows) - 1:
            return low + self._slope_beyond(y) * past
        before, after, high = self._xs[index], self._xs[index + 1], self._rows[index + 1](y)
        share = past / (after - before)
        if self._per_x:
            # Where seconds / x falls, x times it could exceed what was measured after it.
            return max(low, min(high, x * (low / before + (high / after - low / before) * share)))
        return low + (high - low) * share
