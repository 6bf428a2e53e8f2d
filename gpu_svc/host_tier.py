"""The executor's side of the host tier: KV blocks in the shared pool, and decode attention done by cpu_attn_svc."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.kv_cache import KvPlaces, write_kv
from gpu_svc.kv_layout import KvBlocks
from svc_common.tensor_plane import CpuSubBatch, LayerBatch, Report, TensorPlane

# Far longer than the CPU attends for in one layer; the service's death is noticed long before.
_TIMEOUT_S = 5.0
# The same for a batch on its way through the CPU layers, and for attention, which may have to wait for one of them.
_LAYERS_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class CpuWork:
    """CPU decodes of one sub-batch: the same for all layers."""

    slot: int
    """Exchange slot."""
    context_tokens: NDArray[np.int32]
    """[n], the new token included."""
    block_tables: NDArray[np.int32]
    """[n, stride]"""

    def __len__(self) -> int:
        return len(self.context_tokens)


class HostTier:
    """One attached CPU attention service. Raises PlaneError from any method once that is lost."""

    def __init__(self, plane: TensorPlane, num_threads: int) -> None:
        self._plane = plane
        self._number = 0
        self._place_of: dict[int, int] = {}  # of this iteration's layer batches
        self.num_threads = num_threads
        self.num_blocks = plane.num_blocks
        self.blocks = _as_blocks(plane.pool, plane.scales)
        """The shared pool, all layers but those that the CPU computes."""
        self.lower = _as_blocks(plane.lower, plane.lower_scales)
        """The lower pool: those layers, for both tiers; see lower_pool.py."""
        self.first_layer = len(plane.lower)
        """Of `blocks`."""
        self._hidden = torch.from_numpy(plane.hidden)
        self._timeout_s = _LAYERS_TIMEOUT_S if self.first_layer else _TIMEOUT_S
        self._exchange = [
            tuple(map(_as_tensor, (plane.q(slot), plane.k(slot), plane.v(slot), plane.out(slot)))) for slot in range(2)
        ]
        self._finish_ns = 0

    @property
    def wait_ns(self) -> int:
        """Spent in `wait` and `finish` so far."""
        return self._plane.wait_ns + self._finish_ns

    def begin(
        self,
        work: Sequence[CpuWork],
        host_blocks_used: int,
        trace: bool = False,
        layers: range | None = None,
        layer_batches: Sequence[LayerBatch] = (),
        in_turn: bool = False,
    ) -> None:
        """Describes an iteration: its CPU decodes in the order in which they are submitted, and the batches that pass
        the CPU layers.

        Each of `layers`, or of all, submits the decodes of one sub-batch after the other; or, `in_turn`, all layers of
        one sub-batch come before those of the next.
        """
        self._number += 1
        self._place_of = {id(batch): place for place, batch in enumerate(layer_batches)}
        sub_batches = [CpuSubBatch(part.slot, part.context_tokens, part.block_tables) for part in work]
        self._plane.begin(self._number, sub_batches, host_blocks_used, trace, layers, layer_batches, in_turn)

    def submit(self, slot: int, q: Tensor, kv: Tensor, rows: slice) -> None:
        """Hands over rows of q [n, num_q_heads, head_dim] and kv [n, 2, num_kv_heads, head_dim]: the slot's next layer.

        Copies from a GPU end only when the data is there, so the doorbell rings after it.
        """
        num = rows.stop - rows.start
        if q.is_cpu:
            self._plane.submit_rows(slot, q, kv, rows.start, num)
            return
        to_q, to_k, to_v, _ = self._exchange[slot]
        to_q[:num].copy_(q[rows])
        to_k[:num].copy_(kv[rows, 0])
        to_v[:num].copy_(kv[rows, 1])
        self._plane.submit(slot)

    def wait(self, slot: int, out: Tensor, rows: slice) -> None:
        """Writes the attention of this slot's last submit to rows of out [n, num_q_heads, head_dim]."""
        num = rows.stop - rows.start
        if out.is_cpu:
            self._plane.wait_rows(slot, out, rows.start, num, self._timeout_s)
            return
        self._plane.wait(slot, self._timeout_s)
        out[rows].copy_(self._exchange[slot][3][:num])

    def put_hidden(self, batch: LayerBatch, hidden: Tensor) -> None:
        """Hands over hidden [n, hidden_size] for the CPU layers; `submit_layers` rings for all."""
        self._rows(batch).copy_(hidden)

    def submit_layers(self) -> None:
        """Once all batches are put that `begin` named."""
        self._plane.submit_layers()

    def take_hidden(self, batch: LayerBatch, hidden: Tensor) -> None:
        """Waits for one of those batches and writes what the CPU layers made of it to hidden [n, hidden_size]."""
        self._plane.wait_layers(self._place_of[id(batch)], self._timeout_s)
        hidden.copy_(self._rows(batch))

    def _rows(self, batch: LayerBatch) -> Tensor:
        return self._hidden[batch.first_row : batch.first_row + batch.num_tokens]

    def finish(self) -> Report:
        """Ends an iteration that had work for the CPU."""
        start = time.perf_counter_ns()
        report = self._plane.finish(self._timeout_s)
        self._finish_ns += time.perf_counter_ns() - start
        return report

    def layer(self, layer: int) -> KvBlocks:
        """Blocks of a layer of the model: of the lower pool, where it is one of the CPU's."""
        return self.lower[layer] if layer < self.first_layer else self.blocks[layer - self.first_layer]

    def write(self, layer: int, places: KvPlaces, kv: Tensor) -> None:
        """Stores a prefill chunk's kv [n, 2, num_kv_heads, head_dim]; `places` are the CPU's, in that layer's pool."""
        write_kv(self.layer(layer), places, kv.cpu())

    @property
    def is_alive(self) -> bool:
        return self._plane.peer_alive()

    def close(self) -> None:
        """Gives the pool up; memory is unmapped once the last tensor on it is gone."""
        self._plane.close()
        self.blocks = self.lower = KvBlocks(torch.empty(0))
        self._hidden = torch.empty(0)
        self._exchange = []


def _as_blocks(pool: NDArray[np.generic], scales: NDArray[np.generic] | None) -> KvBlocks:
    return KvBlocks(_as_tensor(pool), None if scales is None else torch.from_numpy(scales))


def _as_tensor(array: NDArray[np.generic]) -> Tensor:
    """A view; numpy has no bf16 and shows its bits as uint16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
