"""Attention on the device: one small interface, `AttentionBackend`, and its implementations."""

import torch

from gpu_svc.attention.backend import AttentionBackend, DecodeAttention, PrefillAttention
from gpu_svc.attention.cpu_backend import CpuAttention
from gpu_svc.attention.torch_backend import TorchAttention
from gpu_svc.device_kernels import has_triton
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


def make_backend(spec: ModelSpec, shape: KvShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The device's own; `dtype` is the compute type."""
    if device.type == "cpu":
        return CpuAttention(spec, shape, dtype)
    if not has_triton(device):
        return TorchAttention(spec, shape.block_tokens, dtype, device)
    from gpu_svc.attention.triton_backend import TritonAttention  # Torch for CPUs brings no Triton.

    return TritonAttention(spec, shape.block_tokens, dtype, device)
