"""What the CPU attention services of a recording are called."""

from collections.abc import Iterable

from svc_common.trace import IterationTrace


def service_names(traces: Iterable[IterationTrace]) -> dict[int, str]:
    """By host pool. One without a number, even where it had nothing to do; several by that of their pool."""
    pools = sorted({events.pool for trace in traces for events in trace.cpu})
    return {pool: f"cpu_attn_svc {pool}" for pool in pools} if pools[1:] else {(pools or [0])[0]: "cpu_attn_svc"}
