"""Grids of measurements and what is kept of them; under the profiler."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def steps(first: int, last: int, factor: int) -> Iterator[int]:
    """first, first * factor, ..., last; nothing where last is below 1."""
    value = first
    while 0 < value < last:
        yield value
        value *= factor
    if last > 0:
        yield last


def lesser(measure: Callable[[], Iterable[tuple[Any, ...]]]) -> dict[tuple[int, ...], float]:
    """Seconds by what was measured, the lesser of two rounds, in order. `measure` yields points, seconds last."""
    seconds: dict[tuple[int, ...], float] = {}
    for point in (*measure(), *measure()):
        seconds[point[:-1]] = min(seconds.get(point[:-1], point[-1]), point[-1])
    return dict(sorted(seconds.items()))


def points(seconds: Mapping[tuple[int, ...], float]) -> tuple[Any, ...]:
    """As Tables hold them."""
    return tuple((*key, value) for key, value in seconds.items())
