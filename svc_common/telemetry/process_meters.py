"""What every service says of its own process."""

import os
import resource
from pathlib import Path

from svc_common.telemetry import instruments
from svc_common.telemetry.meters import Meters, Sample

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def observe_process(meters: Meters) -> None:
    """CPU time and memory, read when they are asked for."""
    meters.observe(instruments.CPU_SECONDS, _cpu_seconds)
    meters.observe(instruments.RESIDENT_BYTES, _resident_bytes)


def _cpu_seconds() -> list[Sample]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [Sample(usage.ru_utime, ("user",)), Sample(usage.ru_stime, ("system",))]


def _resident_bytes() -> list[Sample]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return [Sample(pages * _PAGE_BYTES)]
