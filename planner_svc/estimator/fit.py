"""Finds by what a few predicted quantities must be multiplied so that their sum is what was measured; no I/O.

A Kalman filter over the multipliers (Kalman 1960; with one observation at a time it is recursive least squares that
forgets). What an observation cannot tell apart moves in proportion to what it contributes. What it lacks moves a part
of the way, too: a processor that others slow down is slower at everything, also at what has not been tried since.
"""

from collections.abc import Sequence
from math import sqrt
from operator import add

_LOWEST, _HIGHEST = 0.25, 4.0
"""One stall, or one wrong clock, must not put a mode out of reach."""
_PRIOR_VARIANCE = 0.4**2
"""Of a multiplier before anything was measured, and the most it ever becomes."""
_DRIFT_VARIANCE = 0.01**2
"""By which a multiplier may change from one observation to the next."""
_COMMON = 0.5
"""Of both variances: what all multipliers share."""
_LEAST_NOISE, _MOST_NOISE = 0.03**2, 0.5**2
"""Variance of a measurement relative to its prediction; follows what is seen."""
_NOISE_WEIGHT = 0.05
"""Of the newest measurement in it."""
_SURPRISE = 3.0
"""Standard deviations beyond which a measurement is cut down: one stall is no news."""
_LARGEST_STEP = 0.5
_NEWS = 3
"""So many surprises of one direction in a row are: what was learned no longer holds."""


class Fit:
    """Multipliers of a few quantities. A plain list of floats, since numpy costs more at this size."""

    def __init__(self, first: Sequence[float]) -> None:
        """`first`: the multipliers before the first observation, 1 or 0. Those that begin at 0 stay at or above 0."""
        self.values = list(first)
        self._first = tuple(first)
        self._bounds = [(0.0, 1.0) if value == 0.0 else (_LOWEST, _HIGHEST) for value in first]
        self._noise = _LEAST_NOISE
        self._num_surprises = 0
        """In a row; negative ones count downwards."""
        self._correlation = [
            [1.0 if i == j else _COMMON * one * other for j, other in enumerate(first)] for i, one in enumerate(first)
        ]
        self._drifts = [[_DRIFT_VARIANCE * value for value in row] for row in self._correlation]
        self._covariance: list[list[float]] = []
        self._forget()

    def _forget(self) -> None:
        self._covariance = [[_PRIOR_VARIANCE * value for value in row] for row in self._correlation]

    def observe(self, predicted: Sequence[float], measured: float) -> None:
        """`predicted`: the quantities in the unit of `measured`. Without a prediction or a measurement nothing changes.

        The multipliers then fit better; `values` is the same list.
        """
        expected = _dot(self._first, predicted)
        if expected <= 0 or measured <= 0:
            return
        shares = [value / expected for value in predicted]
        self._drift()
        error = measured / expected - _dot(self.values, shares)
        spread = self._spread(shares)
        limit = min(_LARGEST_STEP, _SURPRISE * sqrt(spread[1]))
        if abs(error) > limit:
            error = limit if error > 0 else -limit
            self._num_surprises = max(1, self._num_surprises + 1) if error > 0 else min(-1, self._num_surprises - 1)
            if abs(self._num_surprises) >= _NEWS:
                self._num_surprises = 0
                self._forget()
                spread = self._spread(shares)
        else:
            self._num_surprises = 0
        self._update(error, *spread)
        noise = self._noise + _NOISE_WEIGHT * (error * error - self._noise)
        self._noise = min(_MOST_NOISE, max(_LEAST_NOISE, noise))

    def _drift(self) -> None:
        """Certainty fades, but never below what was known at the start."""
        covariance = self._covariance
        for row, drift in zip(covariance, self._drifts, strict=True):
            row[:] = map(add, row, drift)
        for i, row in enumerate(covariance):
            if row[i] > _PRIOR_VARIANCE:
                scale = sqrt(_PRIOR_VARIANCE / row[i])
                for j in range(len(row)):
                    row[j] *= scale
                    covariance[j][i] *= scale

    def _spread(self, shares: Sequence[float]) -> tuple[list[float], float]:
        """Covariance of the multipliers with the sum, and variance of the sum."""
        columns = [_dot(row, shares) for row in self._covariance]
        return columns, _dot(columns, shares) + self._noise

    def _update(self, error: float, columns: Sequence[float], variance: float) -> None:
        for i, column in enumerate(columns):
            gain = column / variance
            lowest, highest = self._bounds[i]
            self.values[i] = min(highest, max(lowest, self.values[i] + gain * error))
            row = self._covariance[i]
            row[:] = [value - gain * other for value, other in zip(row, columns, strict=True)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(left, right, strict=True)])
