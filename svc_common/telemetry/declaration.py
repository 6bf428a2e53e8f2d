"""What a metric is: one declaration for the SDK, for Prometheus, for the tests and for the table in the docs."""

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """As OpenTelemetry has it."""

    COUNTER = "counter"
    """Only grows."""
    GAUGE = "gauge"
    """A value at the moment of reading."""
    HISTOGRAM = "histogram"


_PROMETHEUS_UNITS = {"s": "seconds", "By": "bytes"}


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric, by its OpenTelemetry name."""

    name: str
    kind: Kind
    unit: str
    """UCUM: "s", "By", or what is counted, in braces."""
    text: str
    services: tuple[str, ...]
    """Who has it: no other does, so that sums over services count nothing twice."""
    attributes: tuple[str, ...] = ()
    """Those that a series may have."""
    bounds: tuple[float, ...] = ()
    """Of a histogram's buckets, each inclusive, in `unit`, ascending."""

    @property
    def prometheus_name(self) -> str:
        """As OpenTelemetry's exporters write it. Of a histogram it is what stands before _bucket, _sum and _count."""
        name = re.sub(r"[^a-zA-Z0-9:]+", "_", self.name)
        unit = _PROMETHEUS_UNITS.get(self.unit, "")
        if unit and not name.endswith(f"_{unit}"):
            name = f"{name}_{unit}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name
