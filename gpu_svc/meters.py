"""The service's metrics, read from the executor when they are asked for."""

from gpu_svc.executor import Executor
from svc_common.telemetry import instruments
from svc_common.telemetry.meters import Meters, Sample


def observe_executor(meters: Meters, executor: Executor) -> None:
    def memory() -> list[Sample]:
        status = executor.status()
        return [Sample(status.weight_bytes, ("weights",)), Sample(status.gpu_kv_bytes, ("kv_cache",))]

    def layers() -> list[Sample]:
        resident, streamed = executor.resident_layers, len(executor.streamed_layers)
        return [Sample(resident, ("resident",)), Sample(streamed, ("streamed",))]

    meters.observe(instruments.GPU_MEMORY, memory)
    meters.observe(instruments.MODEL_LAYERS, layers)
