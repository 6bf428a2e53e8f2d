"""Swaps beside the layers: both directions on queues of their own, some layers at a time.

    out   layers 0-3 to the host │ 4-7 │ ...
    back             0-3 to the GPU │ 4-7 │ ...      each after the same layers have left: it may take their blocks
    main                    layer 0, 1, 2, 3 │ 4, ...  each after both

So whoever uses a layer's blocks next, on the GPU or, by what the main stream submits, on the host, finds them moved.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from gpu_svc.kv_layout import KvBlocks
from gpu_svc.kv_swap import BlockMoves, Places, copy_at

_NUM_GROUPS = 8
"""Of layers: that many times can a layer wait for less than all of a swap."""


class Arrival(Protocol):
    """A place in a queue."""

    def wait(self) -> None:
        """Has the main stream wait until the queue has got there."""
        ...


class CopyQueue(Protocol):
    """Copies one after another, beside the main stream; all methods only enqueue."""

    def follow_main(self) -> None:
        """What is enqueued from now on comes after all that the main stream was told so far."""
        ...

    def follow(self, arrival: Arrival) -> None:
        """And after another queue has got there."""
        ...

    def run(self, copy: Callable[[], object]) -> None: ...

    def mark(self) -> Arrival:
        """Where it is once it has done all that was enqueued."""
        ...


Move = tuple[KvBlocks, BlockMoves]
"""Blocks of a host pool, as the device addresses them, and which of them are the source or the target."""


class LayeredSwaps:
    """Of one host tier."""

    def __init__(self, out: CopyQueue, back: CopyQueue) -> None:
        self._out, self._back = out, back
        self._pending: list[tuple[int, Arrival]] = []
        """First layer of a group, in order, and where all its blocks are moved."""

    def swap(self, gpu: KvBlocks, out: Sequence[Move], back: Sequence[Move], head_dim: int) -> None:
        """Enqueues all moves `out` of gpu [num_layers, num_blocks, ...] to the host, and `back` to the GPU.

        Layers count from the first of these blocks.
        """
        self.settle()
        device = gpu.elements.device
        out_work = [(pool, Places(moves, device)) for pool, moves in out if len(moves)]
        back_work = [(pool, Places(moves, device)) for pool, moves in back if len(moves)]
        if not out_work and not back_work:
            return
        num_layers = len(gpu.elements)
        self._out.follow_main()
        self._back.follow_main()
        step = max(1, -(-num_layers // _NUM_GROUPS))
        for first in range(0, num_layers, step):
            layers = slice(first, first + step)
            for pool, places in out_work:
                self._out.run(partial(copy_at, gpu[layers], pool[layers], places, head_dim))
            arrival = self._out.mark()
            if back_work:
                self._back.follow(arrival)
                for pool, places in back_work:
                    self._back.run(partial(copy_at, pool[layers], gpu[layers], places, head_dim))
                arrival = self._back.mark()
            self._pending.append((first, arrival))

    def await_layer(self, layer: int) -> None:
        """Has the main stream wait until the blocks of a layer, and of those before it, are where they belong."""
        while self._pending and self._pending[0][0] <= layer:
            self._pending.pop(0)[1].wait()

    def settle(self) -> None:
        """The same of all layers."""
        for _, arrival in self._pending:
            arrival.wait()
        self._pending = []
