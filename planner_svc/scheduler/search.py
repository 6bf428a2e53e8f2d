"""Bisection over counts."""

from collections.abc import Callable


def last_fitting(lowest: int, highest: int, fits: Callable[[int], bool]) -> int:
    """The last number that fits, where each below one that fits does too; `lowest` where none does."""
    if fits(highest):
        return highest
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        if fits(middle):
            lowest = middle
        else:
            highest = middle
    return lowest
