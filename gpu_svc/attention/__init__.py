"""Attention on the device: one small interface, `AttentionBackend`, and its implementations."""

import logging

import torch

from gpu_svc.attention.backend import AttentionBackend, DecodeAttention, PrefillAttention
from gpu_svc.attention.cpu_backend import CpuAttention
from gpu_svc.attention.torch_backend import TorchAttention
from gpu_svc.device_kernels import has_triton
from gpu_svc.device_loss import check_after_trial
from gpu_svc.kv_cache import KvShape
from svc_common.model.spec import ModelSpec

__all__ = [
    "AttentionBackend",
    "CpuAttention",
    "DecodeAttention",
    "PrefillAttention",
    "TorchAttention",
    "make_backend",
]


logger = logging.getLogger(__name__)


def make_backend(spec: ModelSpec, shape: KvShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The device's own; `dtype` is the compute type. On cuda that is tried first, and what fails is not used.

    Raises DeviceLostError where it costs the device.
    """
    if device.type == "cpu":
        return CpuAttention(spec, shape, dtype)
    by_torch = TorchAttention(spec, shape.block_tokens, dtype, device)
    if not has_triton(device):
        return by_torch
    from gpu_svc.attention.triton_backend import TritonAttention  # Torch for CPUs brings no Triton.
    from gpu_svc.kernel_trial import attention_failure

    if spec.head_dim % 2:
        failure: str | None = f"heads of {spec.head_dim} numbers"
    else:
        by_triton = TritonAttention(spec, shape.block_tokens, dtype, device)
        failure = attention_failure(by_triton, by_torch, spec, shape.block_tokens, dtype, shape.dtype, device)
        check_after_trial(device, failure)
    if failure:
        logger.warning("attention is torch's, not Triton's: %s", failure)
        return by_torch
    logger.info("attention uses Triton's kernels")
    return by_triton
