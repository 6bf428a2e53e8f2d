"""Attention on the device: one small interface, `AttentionBackend`, and its implementations."""

from gpu_svc.attention.backend import AttentionBackend, DecodeAttention, PrefillAttention
from gpu_svc.attention.torch_backend import TorchAttention

__all__ = ["AttentionBackend", "DecodeAttention", "PrefillAttention", "TorchAttention"]
