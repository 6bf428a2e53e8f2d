"""Which kernels a device computes with: Triton's on cuda, where they turn out to run, and otherwise torch's own."""

import logging
from functools import cache
from importlib.util import find_spec

import torch

from svc_common.decoder.ops import DecoderOps, TorchOps

logger = logging.getLogger(__name__)


@cache
def has_triton(device: torch.device) -> bool:
    """Found out once, by running the kernels: they need a C compiler, and a GPU that this Triton knows."""
    if device.type != "cuda":
        return False
    failure = _failure(device)
    if failure:
        logger.warning("Triton's kernels are not used, torch computes: %s", failure)
    else:
        logger.info("layers and sampling use Triton's kernels")
    return not failure


def _failure(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "torch brought no Triton"
    from gpu_svc.kernel_trial import layers_failure, sampling_failure  # Torch for CPUs brings no Triton.

    return layers_failure(device) or sampling_failure(device)


def decoder_ops(device: torch.device) -> DecoderOps:
    if not has_triton(device):
        return TorchOps()
    from gpu_svc.triton_ops import TritonOps  # Torch for CPUs brings no Triton.

    return TritonOps()
