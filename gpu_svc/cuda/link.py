"""Measures the link between host and device, each direction by itself and both at once."""

from dataclasses import dataclass

import torch

from gpu_svc.cuda.events import make_event, nanoseconds
from gpu_svc.cuda.pinned import staging
from gpu_svc.cuda.streams import make_stream

_RUNS = 3


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second of pinned memory."""

    to_device: float
    to_host: float
    each_of_both: float
    """Of either direction while the other one is busy, too."""


def measure_link(device: torch.device, num_bytes: int) -> LinkRates:
    """By the device's clock; the best of several runs, since what disturbs one only adds."""
    down = staging(num_bytes, device), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    up = torch.zeros(num_bytes, dtype=torch.uint8, device=device), staging(num_bytes, device)
    torch.cuda.synchronize(device)

    def rate(*ways: tuple[torch.Tensor, torch.Tensor]) -> float:
        return num_bytes / min(_seconds(device, ways) for _ in range(_RUNS))

    return LinkRates(rate(down), rate(up), rate(down, up))


def _seconds(device: torch.device, ways: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> float:
    """Until the last of (source, target) has crossed."""
    main = torch.cuda.current_stream(device)
    start, end = (make_event(timing=True) for _ in range(2))
    start.record(main)
    for source, target in ways:
        stream = make_stream(device)
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        main.wait_stream(stream)
    end.record(main)
    end.synchronize()
    return nanoseconds(start, end) / 1e9
