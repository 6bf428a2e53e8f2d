"""What arrives when: recorded traces and generated workloads, for the simulator and for the load client."""

from pathlib import Path

from svc_common.workloads import generated, workload
from svc_common.workloads.workload import Arrival, InputError, Workload, at_rate

__all__ = ["Arrival", "InputError", "Workload", "at_rate", "read"]


def read(text: str, limit: int | None = None) -> Workload:
    """The first `limit` requests of what the text names: a file, or e.g. `poisson:prompt=500`. Raises InputError."""
    return generated.generate(text, limit) if generated.is_generated(text) else workload.load(Path(text), limit)
