"""Whether iterations are captured: what the configuration, the device and an epoch's policy say."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gpu_svc.graph_capture import Capture
from svc_common.config import ConfigError
from svc_common.decoder.decoder import Decoder
from svc_common.policy import ExecutionPolicy

_DEFAULT_SHARE = 32
"""Of the device's memory one part of so many."""


@dataclass(slots=True)
class GraphOptions:
    """Of a process, for all its epochs."""

    make_capture: Callable[[], Capture]
    max_bytes: int
    """Of graphs and their buffers on the device; at least 1."""
    with_cpu_work: bool = True
    """Until a replay has left the CPU without an end."""


def graph_bytes(configured: int | None, device: torch.device, memory_bytes: int) -> int:
    """What graphs may take of a device with `memory_bytes`; `configured`: gpu.graph_bytes.

    Raises ConfigError where they are asked for on a device that has none.
    """
    if device.type == "cuda":
        return memory_bytes // _DEFAULT_SHARE if configured is None else configured
    if configured:
        raise ConfigError(f'gpu.graph_bytes is {configured}, device "{device.type}" has no graphs: leave it out')
    return 0


def graph_options(max_bytes: int, device: torch.device) -> GraphOptions | None:
    """None where there are to be none."""
    if max_bytes == 0:
        return None
    from gpu_svc.cuda.graphs import CudaCapture  # Only device cuda needs it.

    return GraphOptions(partial(CudaCapture, device), max_bytes)


def why_eager(decoder: Decoder, policy: ExecutionPolicy) -> str | None:
    """Why no iteration of an epoch can be captured; None where some may be."""
    if decoder.spec.experts is not None:
        return "the host chooses experts"
    if policy.decode_cpu_layers or policy.prefill_cpu_layers:
        return "the CPU computes layers"
    if policy.resident_layers < decoder.spec.num_layers:
        return "weights are streamed"
    return None
