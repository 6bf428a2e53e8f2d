"""Asks each cpu_attn_svc for a region and attaches it; the only place of gpu_svc that calls another service."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

import grpc
import torch

from gpu_svc.cuda.device_side import DeviceSide
from gpu_svc.host_tier import HostPool, HostTier, answer_timeout_s
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from gpu_svc.region_tensors import pool_of
from neoflex.v1 import cpu_attention_pb2 as pb
from neoflex.v1 import cpu_attention_pb2_grpc
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.dtypes import dtype_name
from svc_common.grpc_server import CHANNEL_OPTIONS
from svc_common.policy import ExecutionPolicy
from svc_common.security.tls import TlsFiles
from svc_common.service_link import open_channel
from svc_common.tensor_plane import PlaneError, RegionShape, TensorPlane

# A service on this host either listens or does not.
_CONNECT_S = 1.0
# The service reserves every page of the pool before it answers.
_OPEN_REGION_S = 120.0
# And loads its layers, tens of GB from a disk.
_LOAD_LAYERS_S = 1200.0


class CpuAttentionUnavailableError(Exception):
    """A CPU attention service could not be attached; the text says why."""


def region_shape(
    decoder: Decoder, kv_shape: KvShape, limits: Limits, policy: ExecutionPolicy | None = None, num_gpu_blocks: int = 0
) -> RegionShape:
    """The attention that the executor wants computed, and the policy's CPU layers."""
    spec = decoder.spec
    cpu_layers = policy.decode_cpu_layers if policy else 0
    return RegionShape(
        num_layers=spec.num_layers,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_tokens=kv_shape.block_tokens,
        kv_dtype=dtype_name(kv_shape.host_dtype),
        exchange_dtype=dtype_name(decoder.dtype),
        max_sequences=min(limits.max_sequences, limits.max_batch_tokens),
        softmax_scale=spec.softmax_scale,
        softcap=spec.attention_softcap,
        sliding_windows=tuple(layer.sliding_window for layer in spec.layers),
        num_cpu_layers=cpu_layers,
        num_gpu_blocks=num_gpu_blocks if cpu_layers else 0,
        hidden_size=spec.hidden_size if cpu_layers else 0,
        max_tokens=limits.max_batch_tokens if cpu_layers else 0,
    )


async def attach_host_tier(
    addresses: Sequence[str], epoch: int, shape: RegionShape, decoder: Decoder, tls: TlsFiles | None = None
) -> tuple[HostTier | None, tuple[str, ...]]:
    """All services that answer, None where none does; and by service why it is not attached, or nothing.

    At the same time: each may have to reserve a large pool, and to load the layers that it is to compute.
    """

    async def attach(address: str) -> HostPool | str:
        try:
            return await attach_pool(address, epoch, shape, decoder, tls)
        except CpuAttentionUnavailableError as error:
            return str(error)

    found = await asyncio.gather(*map(attach, addresses))
    pools = [item if isinstance(item, HostPool) else None for item in found]
    errors = tuple(item if isinstance(item, str) else "" for item in found)
    return HostTier(pools) if any(pools) else None, errors


async def attach_pool(
    address: str, epoch: int, shape: RegionShape, decoder: Decoder, tls: TlsFiles | None = None
) -> HostPool:
    """Raises CpuAttentionUnavailableError."""
    async with open_channel(address, tls, CHANNEL_OPTIONS) as channel:
        try:
            async with asyncio.timeout(_CONNECT_S):
                await channel.channel_ready()
        except TimeoutError:
            raise CpuAttentionUnavailableError(f"nothing answers at {address}") from None
        stub = cpu_attention_pb2_grpc.CpuAttentionServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            request = pb.OpenRegionRequest(epoch=epoch, **asdict(shape))
            if shape.num_cpu_layers:
                request.weight_dtype = dtype_name(decoder.weight_dtype)
                request.model_digest = decoder.spec.digest
            timeout_s = _LOAD_LAYERS_S if shape.num_cpu_layers else _OPEN_REGION_S
            region = await stub.OpenRegion(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise CpuAttentionUnavailableError(f"{address}: {error.code().name}: {error.details()}") from error
    try:
        plane = TensorPlane.attach(region.path, region.descriptor_endpoint, epoch, shape)
    except PlaneError as error:
        raise CpuAttentionUnavailableError(f"the region of {address} cannot be attached: {error}") from error
    # Pinning takes a while, and health is asked for meanwhile.
    return await asyncio.to_thread(host_pool, plane, region.num_threads, decoder.device)


def host_pool(plane: TensorPlane, num_threads: int, device: torch.device) -> HostPool:
    """Of an attached region, with what the device itself does with it; pins the region where that is a GPU's."""
    return HostPool(plane, num_threads, _device_side(plane, device))


def _device_side(plane: TensorPlane, device: torch.device) -> DeviceSide | None:
    if device.type != "cuda":
        return None
    from gpu_svc.cuda.region import give_to_device

    return give_to_device(plane, pool_of(plane), device, answer_timeout_s(plane))
