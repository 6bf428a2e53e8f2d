"""What a service counts, as plain numbers: cheap enough for what runs each iteration, and read by exporters alone.

The SDK's own instruments take some 15 µs a value; these take a tenth of one, whether or not anybody ever reads them.
A service writes on one thread and exporters read on others: a reading may miss what is being written.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from svc_common.telemetry.declaration import Instrument, Kind


class Sample(NamedTuple):
    """One series of a counter or gauge at the moment of reading."""

    value: float
    labels: tuple[str, ...] = ()
    """Values of the instrument's attributes, in its order; "" where the series lacks one."""


Read = Callable[[], Iterable[Sample]]


class Distribution:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: each bucket's largest value, ascending; what is greater than the last has a bucket of its own."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Of all values."""

    def observe(self, value: float, num: int = 1) -> None:
        """`num` values that are the same."""
        self.counts[bisect_left(self._bounds, value)] += num
        self.total += value * num


class Histogram:
    """A distribution for each combination of attributes."""

    def __init__(self, instrument: Instrument) -> None:
        assert instrument.kind is Kind.HISTOGRAM
        self.instrument = instrument
        self._series: dict[tuple[str, ...], Distribution] = {}

    def of(self, *labels: str) -> Distribution:
        """The series with these values of the attributes, in the instrument's order; "" for one that it lacks."""
        series = self._series.get(labels)
        if series is None:
            assert len(labels) == len(self.instrument.attributes), self.instrument.name
            series = self._series[labels] = Distribution(self.instrument.bounds)
        return series

    def series(self) -> list[tuple[tuple[str, ...], Distribution]]:
        return list(self._series.items())


class Counter:
    """A number for each combination of attributes."""

    def __init__(self, instrument: Instrument, known: Iterable[tuple[str, ...]] = ()) -> None:
        """`known` combinations are there from the start, at 0: a rate sees the first event of each."""
        assert instrument.kind is Kind.COUNTER
        self._num_attributes = len(instrument.attributes)
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(known, 0)

    def add(self, value: float, *labels: str) -> None:
        assert len(labels) == self._num_attributes
        self._values[labels] = self._values.get(labels, 0) + value

    def read(self) -> list[Sample]:
        return [Sample(value, labels) for labels, value in list(self._values.items())]


class Meters:
    """All of one service."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.histograms: list[Histogram] = []
        self.observed: list[tuple[Instrument, Read]] = []
        """Counters and gauges."""

    def histogram(self, instrument: Instrument) -> Histogram:
        self._check(instrument)
        histogram = Histogram(instrument)
        self.histograms.append(histogram)
        return histogram

    def counter(self, instrument: Instrument, *known: tuple[str, ...]) -> Counter:
        counter = Counter(instrument, known)
        self.observe(instrument, counter.read)
        return counter

    def observe(self, instrument: Instrument, read: Read) -> None:
        """`read` is called at each collection, on an exporter's thread."""
        self._check(instrument)
        assert instrument.kind is not Kind.HISTOGRAM
        self.observed.append((instrument, read))

    def _check(self, instrument: Instrument) -> None:
        assert self.service in instrument.services, f"{instrument.name} is not {self.service}'s"
        names = {histogram.instrument.name for histogram in self.histograms} | {item.name for item, _ in self.observed}
        assert instrument.name not in names, f"{instrument.name} is there twice"


def value(number: Callable[[], float]) -> Read:
    """A reading of one series without attributes."""
    return lambda: (Sample(number()),)
