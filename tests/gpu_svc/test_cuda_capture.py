"""How captures use torch's pools of memory, with torch's part played: what its allocator refuses is refused here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gpu_svc.cuda import graphs
from gpu_svc.cuda.graphs import CudaCapture

POOL = tuple[int, int]


class Allocator:
    """By pool: graphs that use it, and captures under way. A pool that no graph uses any more is used up."""

    def __init__(self) -> None:
        self.uses: dict[POOL, int] = {}
        self.underway: list[POOL] = []
        self.num_pools = 0
        self.end_raises = False

    def new_pool(self) -> POOL:
        self.num_pools += 1
        return 0, self.num_pools

    def end(self, index: int, pool: POOL) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, index: int, pool: POOL) -> None:
        assert self.uses[pool] > 0
        self.uses[pool] -= 1

    def empty_cache(self) -> None:
        assert not self.underway, "INTERNAL ASSERT FAILED: captures_underway.empty()"

    @contextmanager
    def graph(self, graph: "Graph", pool: POOL, **_: Any) -> Iterator[None]:
        self.empty_cache()
        assert self.uses.get(pool) != 0, "INTERNAL ASSERT FAILED: use_count > 0"
        self.uses[pool] = self.uses.get(pool, 0) + 1
        self.underway.append(pool)
        try:
            yield
        finally:
            if self.end_raises:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self.end(0, pool)
            graph.pool = pool


class Graph:
    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.pool: POOL | None = None

    def __del__(self) -> None:
        if self.pool is not None:
            self._allocator.release(0, self.pool)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", allocator.new_pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(allocator))
    monkeypatch.setattr(torch.cuda, "graph", allocator.graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
    monkeypatch.setattr(graphs, "_capture_stream", lambda device: None)
    return allocator


def fails() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_graphs_share_a_pool_as_long_as_there_are_any(allocator: Allocator) -> None:
    capture = CudaCapture(torch.device("cuda", 0))
    too_large = capture.capture(lambda: None)
    del too_large
    kept = [capture.capture(lambda: None), capture.capture(lambda: None)]
    first, second = allocator.uses
    assert allocator.uses == {first: 0, second: 2}
    del kept
    assert allocator.uses == {first: 0, second: 0}


@pytest.mark.parametrize("end_raises", [False, True])
def test_a_capture_that_fails_leaves_nothing_under_way(end_raises: bool, allocator: Allocator) -> None:
    capture = CudaCapture(torch.device("cuda", 0))
    kept = capture.capture(lambda: None)
    allocator.end_raises = end_raises
    with pytest.raises(RuntimeError):
        capture.capture(fails)
    allocator.end_raises = False
    allocator.empty_cache()
    (uses,) = allocator.uses.values()
    assert uses == 1
    assert kept is not None
    capture.capture(lambda: None)
