"""Events of a device, with types."""

import torch


def make_event(timing: bool = False) -> torch.cuda.Event:
    """`timing`: `nanoseconds` may be asked of it."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    return event


def is_done(event: torch.cuda.Event) -> bool:
    """Whether its stream has got there."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def nanoseconds(before: torch.cuda.Event, after: torch.cuda.Event) -> int:
    """Between two that are done, by the device's clock."""
    return round(1e6 * float(before.elapsed_time(after)))
