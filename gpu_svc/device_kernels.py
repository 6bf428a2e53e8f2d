"""Which kernels a device computes with: Triton's on cuda, where torch brought it, and otherwise torch's own."""

from importlib.util import find_spec

import torch

from svc_common.decoder.ops import DecoderOps, TorchOps


def has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def decoder_ops(device: torch.device) -> DecoderOps:
    if not has_triton(device):
        return TorchOps()
    from gpu_svc.triton_ops import TritonOps  # Torch for CPUs brings no Triton.

    return TritonOps()
