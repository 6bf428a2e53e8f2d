"""Corrects predictions by what iterations really took; fed by the scheduler from each result."""

from svc_common.plan import Mode

_WEIGHT = 0.1
"""Of the newest ratio in the moving average: about the last ten iterations count."""
_LOWEST, _HIGHEST = 0.25, 4.0
"""One stall, or one wrong clock, must not put a mode out of reach."""


class Calibration:
    """A moving average of measured / predicted seconds for each mode."""

    def __init__(self) -> None:
        self._factors: dict[Mode, float] = {}

    def factor(self, mode: Mode) -> float:
        """Multiply an uncalibrated prediction by this.

        A mode that has not run yet takes the other's: much of what makes a table wrong is common to both, and the mode
        that is corrected first must not win or lose by that alone.
        """
        if mode in self._factors:
            return self._factors[mode]
        return next(iter(self._factors.values()), 1.0)

    def observe(self, mode: Mode, predicted_s: float, measured_s: float) -> None:
        """`predicted_s` is uncalibrated. An iteration without a prediction or without a clock says nothing."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        ratio = min(_HIGHEST, max(_LOWEST, measured_s / predicted_s))
        before = self.factor(mode)
        self._factors[mode] = before + _WEIGHT * (ratio - before)
