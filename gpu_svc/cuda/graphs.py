"""CUDA graphs: how device cuda captures."""

from collections.abc import Callable

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
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def repeats_host_tier(self, host: HostTier) -> bool:
        return host.uses_stream_doorbells

    def capture(self, run: Callable[[], None]) -> Replay:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # Other threads may meanwhile pin memory or copy weights.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        finally:
            torch.cuda.set_stream(stream)  # Torch stays on the other one where the capture's end raises.
        return CudaReplay(graph)

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # What eager runs have left is no graph's.
        free, _ = torch.cuda.mem_get_info(self._device)
        return free
