"""The service's metrics, read from the executor when they are asked for."""

from collections.abc import Callable

from gpu_svc.executor import Executor
from svc_common.telemetry import instruments
from svc_common.telemetry.meters import Meters, Sample


def observe_executor(meters: Meters, loaded: Callable[[], Executor | None]) -> None:
    """`loaded`: None until the model is; there are no figures before."""

    def memory() -> list[Sample]:
        if (executor := loaded()) is None:
            return []
        status = executor.status()
        return [Sample(status.weight_bytes, ("weights",)), Sample(status.gpu_kv_bytes, ("kv_cache",))]

    def layers() -> list[Sample]:
        if (executor := loaded()) is None:
            return []
        resident, streamed = executor.resident_layers, len(executor.streamed_layers)
        return [Sample(resident, ("resident",)), Sample(streamed, ("streamed",))]

    meters.observe(instruments.GPU_MEMORY, memory)
    meters.observe(instruments.MODEL_LAYERS, layers)
