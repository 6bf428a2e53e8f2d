"""Gives device cuda a region of the tensor plane: pins it, and finds out what the device can do with it by itself."""

import logging
from contextlib import suppress
from functools import partial

import torch

from gpu_svc.cuda.device_side import DeviceSide
from gpu_svc.cuda.doorbells import StreamDoorbells
from gpu_svc.cuda.driver import DriverError
from gpu_svc.cuda.pinned import Pinned, pin
from gpu_svc.cuda.streams import CudaOperations, CudaQueue, can_address, can_ring
from gpu_svc.kv_layout import KvBlocks
from svc_common.tensor_plane import TensorPlane

logger = logging.getLogger(__name__)


def give_to_device(
    plane: TensorPlane, blocks: KvBlocks, device: torch.device, answer_timeout_s: float
) -> DeviceSide | None:
    """`blocks` are the plane's pool. None where the region can't be pinned. Takes seconds where it is large."""
    pinned = pin(plane.memory.ctypes.data, plane.memory.nbytes, device, "host KV pool")
    if pinned is None:
        return None
    views = _views(pinned, blocks) if can_address(device) else None
    doorbells = _doorbells(pinned, plane, answer_timeout_s) if can_ring(device) else None
    return DeviceSide(doorbells, views, partial(CudaQueue, device), partial(_unpin, pinned))


def _doorbells(pinned: Pinned, plane: TensorPlane, answer_timeout_s: float) -> StreamDoorbells | None:
    try:
        operations = CudaOperations(pinned.device)
    except DriverError as error:
        logger.warning("the device does not ring although it could: %s", error)
        return None
    return StreamDoorbells(plane, operations, pinned.device_address, answer_timeout_s)


def _views(pinned: Pinned, blocks: KvBlocks) -> KvBlocks:
    scales = None if blocks.scales is None else pinned.view(blocks.scales)
    return KvBlocks(pinned.view(blocks.elements), scales)


def _unpin(pinned: Pinned) -> None:
    with suppress(RuntimeError):  # Of a device that has failed, which does nothing any more.
        torch.cuda.synchronize(pinned.device)
        pinned.close()
