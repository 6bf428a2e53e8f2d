"""Capture without a GPU: a replay calls the function again, over the same buffers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from gpu_svc.graph_options import GraphOptions
from gpu_svc.host_tier import HostTier

GRAPH_BYTES = 2**20
"""That each kept graph takes."""


class RepeatReplay:
    def __init__(self, capture: "RepeatCapture", run: Callable[[], None]) -> None:
        self._capture = capture
        self._run = run

    def run(self) -> None:
        self._capture.num_replays += 1
        self._run()


@dataclass
class RepeatCapture:
    """`Capture`."""

    fails: Callable[[], bool] = lambda: False
    reaches_host: bool = True
    num_replays: int = 0
    _alive: WeakSet[RepeatReplay] = field(default_factory=WeakSet)

    def repeats_host_tier(self, host: HostTier) -> bool:
        return self.reaches_host

    def capture(self, run: Callable[[], None]) -> RepeatReplay:
        if self.fails():
            raise RuntimeError("operation not permitted when stream is capturing")
        replay = RepeatReplay(self, run)
        self._alive.add(replay)
        return replay

    def free_bytes(self) -> int:
        return 2**40 - GRAPH_BYTES * len(self._alive)


def graph_options(capture: RepeatCapture, max_bytes: int = 2**30) -> GraphOptions:
    return GraphOptions(lambda: capture, max_bytes)
