"""Which kernels a device computes with: Triton's on cuda, where they turn out to run, and otherwise torch's own."""

import logging
from functools import cache
from importlib.util import find_spec

import torch

from gpu_svc.device_loss import check_after_trial
from svc_common.decoder.ops import DecoderOps, TorchOps

logger = logging.getLogger(__name__)


def has_triton(device: torch.device) -> bool:
    """Whether its kernels run there: they need a C compiler, and a GPU that this Triton knows."""
    return device.type == "cuda" and _runs_on_cuda()


@cache
def _runs_on_cuda() -> bool:
    """Found out once, by running them. Raises DeviceLostError where nothing runs there any more."""
    device = torch.device("cuda")
    failure = _failure(device)
    check_after_trial(device, failure)
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
