"""CpuAttentionService over gRPC: checks requests, hands them to the host, answers."""

import asyncio
import math
import os

from cpu_attn_svc.host import AttentionHost, LayersUnavailableError, WantedLayers
from neoflex.v1 import cpu_attention_pb2 as pb
from neoflex.v1 import cpu_attention_pb2_grpc
from svc_common.errors import FieldViolation, failed_precondition, invalid_argument, invalid_arguments, unavailable
from svc_common.tensor_plane import PlaneError, RegionShape

_EXCHANGE_DTYPES = ("fp32", "bf16", "fp16")
_KV_DTYPES = (*_EXCHANGE_DTYPES, "int8")
_WEIGHT_DTYPES = (*_EXCHANGE_DTYPES, "int8", "int4")
# Limits of each count: far above any model, and low enough that no product of them overflows.
_COUNT_LIMITS = {
    "num_layers": 256,
    "num_q_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 256,
    "block_tokens": 4096,
    "max_sequences": 65536,
}
_LAYER_LIMITS = {"hidden_size": 65536, "max_tokens": 65536}


class CpuAttentionServicer(cpu_attention_pb2_grpc.CpuAttentionServiceServicer):
    def __init__(self, host: AttentionHost) -> None:
        self._host = host
        self._changing = asyncio.Lock()
        self.is_stopping = False
        """Told to: opens no region any more, and says so."""

    async def OpenRegion(self, request: pb.OpenRegionRequest, context: object) -> pb.OpenRegionResponse:
        shape = region_shape(request)
        wanted = WantedLayers(request.weight_dtype, request.model_digest) if shape.num_cpu_layers else None
        async with self._changing:
            if self.is_stopping:
                raise unavailable("STOPPING", "the service has been told to stop")
            try:
                opened = await asyncio.to_thread(self._host.open_region, request.epoch, shape, wanted)
            except PlaneError as error:
                raise failed_precondition("REGION_UNAVAILABLE", f"cpu_attn.kv_bytes: {error}") from error
            except LayersUnavailableError as error:
                raise failed_precondition("LAYERS_UNAVAILABLE", str(error)) from error
        return pb.OpenRegionResponse(
            path=opened.path,
            region_bytes=opened.region_bytes,
            descriptor_endpoint=opened.endpoint,
            num_blocks=opened.num_blocks,
            num_threads=self._host.num_threads,
            instruction_set=self._host.instruction_set,
        )

    async def SetThreads(self, request: pb.SetThreadsRequest, context: object) -> pb.SetThreadsResponse:
        limit = self._host.max_threads
        if not 1 <= request.num_threads <= limit:
            raise invalid_argument("num_threads", f"must be in [1, {limit}], is {request.num_threads}")
        self._host.set_threads(request.num_threads)
        return pb.SetThreadsResponse(num_threads=request.num_threads)

    async def GetCpuAttentionStatus(
        self, request: pb.GetCpuAttentionStatusRequest, context: object
    ) -> pb.GetCpuAttentionStatusResponse:
        status = self._host.status()
        return pb.GetCpuAttentionStatusResponse(
            epoch=status.epoch,
            num_threads=self._host.num_threads,
            max_threads=self._host.max_threads,
            instruction_set=self._host.instruction_set,
            pool_bytes=status.pool_bytes,
            num_blocks=status.num_blocks,
            blocks_used=status.blocks_used,
            iterations=status.iterations,
            pid=os.getpid(),
            huge_page_bytes=status.huge_page_bytes,
            stopping=self.is_stopping,
        )


def region_shape(request: pb.OpenRegionRequest) -> RegionShape:
    """The shape asked for. Raises ServiceError naming each field that is out of range."""
    violations = list(_violations(request))
    if violations:
        raise invalid_arguments(tuple(violations))
    return RegionShape(
        num_layers=request.num_layers,
        num_q_heads=request.num_q_heads,
        num_kv_heads=request.num_kv_heads,
        head_dim=request.head_dim,
        block_tokens=request.block_tokens,
        kv_dtype=request.kv_dtype,
        exchange_dtype=request.exchange_dtype,
        max_sequences=request.max_sequences,
        softmax_scale=request.softmax_scale,
        softcap=request.softcap,
        sliding_windows=tuple(request.sliding_windows),
        num_cpu_layers=request.num_cpu_layers,
        num_gpu_blocks=request.num_gpu_blocks,
        hidden_size=request.hidden_size,
        max_tokens=request.max_tokens,
    )


def _violations(request: pb.OpenRegionRequest) -> list[FieldViolation]:
    found = []

    def require(holds: bool, field: str, description: str) -> None:
        if not holds:
            found.append(FieldViolation(field, description))

    require(request.epoch >= 1, "epoch", "must be at least 1")
    for field, limit in _COUNT_LIMITS.items():
        value = getattr(request, field)
        require(1 <= value <= limit, field, f"must be in [1, {limit}], is {value}")
    if request.num_kv_heads >= 1:
        divides = request.num_q_heads % request.num_kv_heads == 0
        require(divides, "num_kv_heads", f"must divide num_q_heads, is {request.num_kv_heads}")
    for field, allowed in (("kv_dtype", _KV_DTYPES), ("exchange_dtype", _EXCHANGE_DTYPES)):
        value = getattr(request, field)
        require(value in allowed, field, f"must be one of {', '.join(allowed)}, is {value!r}")
    positive = math.isfinite(request.softmax_scale) and request.softmax_scale > 0
    require(positive, "softmax_scale", f"must be positive and finite, is {request.softmax_scale}")
    windows = request.sliding_windows
    one_each = len(windows) in (0, request.num_layers)
    require(one_each, "sliding_windows", f"must be {request.num_layers} or none, are {len(windows)}")
    require(min(windows, default=0) >= 0, "sliding_windows", f"must be at least 0, one is {min(windows, default=0)}")
    capped = math.isfinite(request.softcap) and request.softcap >= 0
    require(capped, "softcap", f"must be at least 0 and finite, is {request.softcap}")
    among = 0 <= request.num_cpu_layers <= request.num_layers
    require(among, "num_cpu_layers", f"must be in [0, {request.num_layers}], is {request.num_cpu_layers}")
    if request.num_cpu_layers > 0:
        for field, limit in _LAYER_LIMITS.items():
            value = getattr(request, field)
            require(1 <= value <= limit, field, f"must be in [1, {limit}], is {value}")
        require(request.num_gpu_blocks >= 0, "num_gpu_blocks", f"must not be negative, is {request.num_gpu_blocks}")
        known = request.weight_dtype in _WEIGHT_DTYPES
        names = ", ".join(_WEIGHT_DTYPES)
        require(known, "weight_dtype", f"must be one of {names}, is {request.weight_dtype!r}")
    return found
