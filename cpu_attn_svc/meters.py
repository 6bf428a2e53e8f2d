"""The service's metrics, read from the host when they are asked for."""

from cpu_attn_svc.host import AttentionHost
from svc_common.telemetry import instruments
from svc_common.telemetry.meters import Meters, Sample, value


def observe_host(meters: Meters, host: AttentionHost) -> None:
    totals = host.totals

    def spent() -> list[Sample]:
        states = {"busy": totals.busy_ns, "waiting": totals.wait_ns, "idle": totals.idle_ns}
        return [Sample(spent_ns / 1e9, (state,)) for state, spent_ns in states.items()]

    meters.observe(instruments.THREADS, value(lambda: host.num_threads))
    meters.observe(instruments.MAX_THREADS, value(lambda: host.max_threads))
    meters.observe(instruments.CPU_ITERATIONS, value(lambda: totals.iterations))
    meters.observe(instruments.CPU_TIME, spent)
    meters.observe(instruments.POOL_SIZE, value(lambda: host.status().pool_bytes))
    meters.observe(instruments.HUGE_PAGES, value(lambda: host.status().huge_page_bytes))
