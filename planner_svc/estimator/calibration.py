"""Corrects predictions by what iterations really took; fed by the scheduler from each result."""

from planner_svc.plan import Mode

_WEIGHT = 0.1
"""Of the newest ratio in the moving average: about the last ten iterations count."""
_LOWEST, _HIGHEST = 0.25, 4.0
"""One stall, or one wrong clock, must not put a mode out of reach."""


class Calibration:
    """A moving average of measured / predicted seconds for each mode."""

    def __init__(self) -> None:
        self._factors = dict.fromkeys(Mode, 1.0)

    def factor(self, mode: Mode) -> float:
        """Multiply an uncalibrated prediction by this. 1 until the mode has run."""
        return self._factors[mode]

    def observe(self, mode: Mode, predicted_s: float, measured_s: float) -> None:
        """`predicted_s` is uncalibrated. An iteration without work or without a clock says nothing."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        ratio = min(_HIGHEST, max(_LOWEST, measured_s / predicted_s))
        self._factors[mode] += _WEIGHT * (ratio - self._factors[mode])
