"""A device that has failed for good: each further call fails, too, and only another process can use it again."""

import logging
import os

import torch

logger = logging.getLogger(__name__)


class DeviceLostError(Exception):
    """The text says what broke it."""


def is_lost(device: torch.device) -> bool:
    """As after a kernel's access to memory that is none. Waits for all that the device was told."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def check_after_trial(device: torch.device, failure: str | None) -> None:
    """Raises DeviceLostError where a trial of Triton's kernels has cost the device, and says what to do."""
    if failure and is_lost(device):
        raise DeviceLostError(
            f"Triton's kernels broke the device ({failure}): without the package triton torch computes"
        )


def end_process(reason: str) -> None:
    """At once, for the supervisor to start it again; the planner then computes what was under way anew."""
    logger.critical("the device cannot be used any more, this process ends: %s", reason)
    os._exit(1)
