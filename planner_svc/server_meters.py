"""What the planner's counters and queues are at the moment of reading, as metrics."""

from collections.abc import Callable
from dataclasses import asdict

from planner_svc.counters import Counters, Load
from planner_svc.engine import Engine
from planner_svc.scheduler import Counters as SchedulerCounters
from svc_common.plan import Mode
from svc_common.telemetry import instruments
from svc_common.telemetry.declaration import Instrument
from svc_common.telemetry.meters import Meters, Sample, value


def observe_engine(meters: Meters, engine: Engine) -> None:
    """All that the engine counts anyhow."""
    _observe_load(meters, engine.load)
    _observe_scheduler(meters, engine.scheduler_counters)
    _observe_work(meters, engine.counters)
    meters.observe(instruments.BY_SLO, lambda: _by_slo(engine))
    meters.observe(instruments.CALIBRATION, lambda: _calibration(engine))
    meters.observe(
        instruments.HEALTH,
        lambda: (Sample(int(engine.is_ready()), ("readiness",)), Sample(int(engine.is_alive()), ("liveness",))),
    )


def _observe_load(meters: Meters, load: Callable[[], Load]) -> None:
    def waiting() -> list[Sample]:
        now = load()
        return [
            Sample(now.num_waiting - now.num_preempted, ("capacity",)),
            Sample(now.num_preempted, ("preempted",)),
        ]

    def by_class() -> list[Sample]:
        return [
            Sample(number, (state, item.name))
            for item in load().classes
            for state, number in (("running", item.num_running), ("waiting", item.num_waiting))
        ]

    def usage() -> float:
        now = load()
        return (now.gpu_blocks_used + now.host_blocks_used) / max(1, now.gpu_blocks + now.host_blocks)

    def blocks() -> list[Sample]:
        now = load()
        return _by_tier(now.gpu_blocks, now.pool_blocks)

    def blocks_used() -> list[Sample]:
        now = load()
        return _by_tier(now.gpu_blocks_used, now.pool_blocks_used)

    meters.observe(instruments.RUNNING, value(lambda: load().num_running))
    meters.observe(instruments.WAITING, value(lambda: load().num_waiting))
    meters.observe(instruments.WAITING_BY_REASON, waiting)
    meters.observe(instruments.MAX_WAITING, value(lambda: load().max_waiting))
    meters.observe(instruments.BY_CLASS, by_class)
    meters.observe(instruments.KV_USAGE, value(usage))
    meters.observe(instruments.KV_BLOCKS, blocks)
    meters.observe(instruments.KV_BLOCKS_USED, blocks_used)


def _by_tier(on_gpu: int, by_pool: tuple[int, ...]) -> list[Sample]:
    return [
        Sample(on_gpu, ("gpu", "")),
        *(Sample(number, ("host", str(pool))) for pool, number in enumerate(by_pool)),
    ]


def _observe_scheduler(meters: Meters, counters: Callable[[], SchedulerCounters]) -> None:
    def observe(instrument: Instrument, name: str) -> None:
        meters.observe(instrument, value(lambda: getattr(counters(), name)))

    observe(instruments.PREEMPTIONS, "preemptions")
    observe(instruments.PROMPT_TOKENS, "prefilled_tokens")
    observe(instruments.GENERATED_TOKENS, "generated_tokens")
    observe(instruments.CACHED_TOKENS, "cached_tokens")
    observe(instruments.RECOMPUTED_TOKENS, "recomputed_tokens")
    meters.observe(
        instruments.ITERATIONS,
        lambda: [Sample(getattr(counters(), f"{mode.value}_iterations"), (mode.value,)) for mode in Mode],
    )


def _observe_work(meters: Meters, counters: Counters) -> None:
    def gpu_time() -> list[Sample]:
        waits = {"wait_cpu": counters.cpu_wait_ns, "wait_weights": counters.weight_wait_ns}
        busy_ns = counters.executor_busy_ns - sum(waits.values())
        states = {"busy": busy_ns, **waits, "idle": counters.executor_idle_ns}
        return [Sample(spent_ns / 1e9, (state,)) for state, spent_ns in states.items()]

    def by_label(instrument: Instrument, **fields: str) -> None:
        """Counters of one instrument, by the value of its attribute."""
        meters.observe(
            instrument, lambda: [Sample(getattr(counters, name), (label,)) for label, name in fields.items()]
        )

    meters.observe(instruments.ACCEPTED, value(lambda: counters.accepted_requests))
    meters.observe(instruments.GPU_TIME, gpu_time)
    by_label(instruments.ATTENDED_TOKENS, gpu="gpu_attended_tokens", cpu="cpu_attended_tokens")
    by_label(instruments.SWAPPED_BYTES, **{"out": "swapped_out_bytes", "in": "swapped_in_bytes"})
    by_label(instruments.THREAD_CHANGES, grown="cpu_threads_grown", shrunk="cpu_threads_shrunk")
    meters.observe(instruments.WEIGHT_BYTES, value(lambda: counters.weight_bytes))
    meters.observe(instruments.PLANNING_TIME, value(lambda: counters.planning_ns / 1e9))


def _by_slo(engine: Engine) -> list[Sample]:
    return [
        Sample(number, (outcome, name))
        for name, item in engine.classes.counters.items()
        for outcome, number in (("in_time", item.in_time), ("late", item.late), ("refused", item.refused))
    ]


def _calibration(engine: Engine) -> list[Sample]:
    factors = engine.calibration_factors()
    if factors is None:
        return []
    parts = asdict(factors)
    further: dict[int, float] = parts.pop("further_pools")
    parts |= {f"cpu_decode_{pool}": factor for pool, factor in further.items()}
    return [Sample(factor, (part,)) for part, factor in parts.items()]
