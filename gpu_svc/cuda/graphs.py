"""CUDA graphs: how device cuda captures."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from weakref import WeakSet

import torch

from gpu_svc.graph_capture import Replay
from gpu_svc.host_tier import HostTier


class CudaReplay:
    """`Replay`."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def run(self) -> None:
        self._graph.replay()


class CudaCapture:
    """`Capture`; all its graphs share one pool of memory, which each may use as if it were alone.

    That is right because no two of them run at the same time, and none keeps a tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: WeakSet[CudaReplay] = WeakSet()
        self._stream = _capture_stream(device)

    def repeats_host_tier(self, host: HostTier) -> bool:
        return host.uses_stream_doorbells

    def capture(self, run: Callable[[], None]) -> Replay:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()  # Torch takes none again whose graphs are all gone.
        try:
            # Other threads may meanwhile pin memory or copy weights.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except BaseException:
            self._give_pool_back()
            raise
        finally:
            torch.cuda.set_stream(stream)  # Torch stays on the other one where the capture's end raises.
        replay = CudaReplay(graph)
        self._alive.add(replay)
        return replay

    def _give_pool_back(self) -> None:
        """After a capture that failed. Where its end raised, torch goes on as if it were under way, and from then on
        refuses to give cached memory back.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):  # It did end, and only then this is refused: the graph gives the pool up itself.
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # What eager runs have left is no graph's.
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: with the first product on a stream it gets workspace for good, which is to lie in no graph's
    pool, and not to be taken anew in each epoch.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        square = torch.zeros(16, 16, device=device)
        torch.mm(square, square)
    stream.synchronize()
    return stream
