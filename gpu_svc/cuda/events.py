"""Events of a device, with types."""

import torch

Wait = tuple[torch.cuda.Event, torch.cuda.Event]
"""Before and after one."""


def make_event(timing: bool = False, in_replays: bool = False, sleeps: bool = False) -> torch.cuda.Event:
    """`timing`: `nanoseconds` may be asked of it. `in_replays`: a capture's replays record it, each of them anew.
    `sleeps`: a thread that waits for it takes no core meanwhile, and wakes up a little later.
    """
    event: torch.cuda.Event = torch.cuda.Event(timing, blocking=sleeps, external=in_replays)  # type: ignore[no-untyped-call]
    return event


def make_wait(in_replays: bool = False) -> Wait:
    return make_event(True, in_replays), make_event(True, in_replays)


def is_done(event: torch.cuda.Event) -> bool:
    """Whether its stream has got there."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def nanoseconds(before: torch.cuda.Event, after: torch.cuda.Event) -> int:
    """Between two that are done, by the device's clock."""
    return round(1e6 * float(before.elapsed_time(after)))
