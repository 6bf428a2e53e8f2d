"""Runs the layers of one iteration so that both processors work at once; where the overlap is.

Two sub-batches, layer i. Both hold prefill chunks and CPU decodes, sub-batch 0 all GPU decodes. Read down; what stands
side by side runs at the same time (NEO, MLSys 2025, section 3):

    GPU                                              CPU
    post 0 [i-1], pre 0 [i], attend prefills [i]     attend 1 [i]
    post 1 [i], pre 1 [i+1], attend decodes 0 [i]    attend 0 [i]

The CPU gets its work in the order 1, 0, 1, 0, ... and may run ahead: 1 [i+1] is submitted before 0 [i] is waited for.

One sub-batch: the CPU attends its CPU decodes beside the GPU's own attention of the same layer.

A cohort c goes through m layers while the batch goes through all L; of c's layers the j-th lies beside L/m of the
batch's, from layer i = j L/m on:

    GPU                                              CPU
    post c [j-1], pre c [j]
    pre, attend, post [i] ... [i + L/m - 1]          attend c [j]
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_svc.batch import Batch
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from svc_common.decoder.decoder import Decoder


class Stage:
    """One sub-batch on its way through the layers. Methods are called in the order in which they stand here."""

    def __init__(
        self,
        batch: Batch,
        decoder: Decoder,
        cache: GpuKvCache,
        host: HostTier | None,
        hidden: Tensor | None = None,
    ) -> None:
        """`hidden` [n, hidden_size] is what an earlier layer made of the batch; without it the batch is embedded."""
        self.batch = batch
        self._decoder = decoder
        self._cache = cache
        self._host = host
        spec = decoder.spec
        # [n, hidden_size]
        self.hidden = decoder.embed(batch.token_ids, batch.positions) if hidden is None else hidden
        self._workspace = decoder.workspace(batch.positions)
        self._q, self._kv = self._workspace.q, self._workspace.kv
        self._attended = torch.empty(
            (batch.num_tokens, spec.num_q_heads, spec.head_dim), dtype=decoder.dtype, device=decoder.device
        )
        # Views of these, made once: each layer writes into the same memory.
        self._gpu_q, self._gpu_attended = (part[batch.gpu_decode_rows] for part in (self._q, self._attended))
        self._has_gpu_kv = bool(len(batch.gpu_kv_places))
        self._has_cpu_decodes = host is not None and bool(len(batch.cpu_work))

    def pre_attention(self, layer: int) -> None:
        """Computes q, k and v, and stores k and v of tokens whose sequence is on the GPU."""
        self._await_weights(layer)
        batch = self.batch
        self._decoder.pre_attention(layer, self.hidden, self._workspace)
        if self._has_gpu_kv:
            self._cache.write(layer, batch.gpu_kv_places, self._kv[batch.gpu_kv_tokens])

    def _await_weights(self, layer: int) -> bool:
        """Whether they had to come."""
        return self._decoder.await_layer(layer)

    def submit(self) -> None:
        """Hands the CPU its decodes; it stores their k and v itself."""
        if self._host and self._has_cpu_decodes:
            self._host.submit(self.batch.cpu_work.slot, self._q, self._kv, self.batch.cpu_decode_rows)

    def attend_prefills(self, layer: int) -> None:
        """Chunks of host sequences leave their K and V in the host pool, layer by layer, none on the GPU."""
        for chunk in self.batch.chunks:
            q, out = self._q[chunk.rows], self._attended[chunk.rows]
            if not chunk.on_host:
                chunk.attention.run(layer, q, self._cache.blocks[layer], out)
                continue
            assert self._host is not None  # Host sequences exist only with a host tier.
            kv = self._kv[chunk.rows]
            self._host.write(layer, chunk.host_places, kv)
            chunk.attention.run_on_host(layer, q, self._host.blocks[layer], kv, out)

    def attend_decodes(self, layer: int) -> None:
        if self.batch.gpu_decode is not None:
            self.batch.gpu_decode.run(layer, self._gpu_q, self._cache.blocks[layer], self._gpu_attended)

    def wait(self) -> None:
        """Until the CPU has attended what was submitted last."""
        if self._host and self._has_cpu_decodes:
            self._host.wait(self.batch.cpu_work.slot, self._attended, self.batch.cpu_decode_rows)

    def post_attention(self, layer: int) -> None:
        self.hidden = self._decoder.post_attention(layer, self._attended, self.hidden)


def run_layers(first: Stage, second: Stage | None, num_layers: int) -> None:
    """Takes one or two sub-batches through all layers; afterwards `hidden` of each is the last layer's."""
    if second is None:
        for layer in range(num_layers):
            _run_layer(first, layer)
        return
    second.pre_attention(0)
    second.submit()
    for layer in range(num_layers):
        first.pre_attention(layer)
        first.submit()
        first.attend_prefills(layer)
        second.attend_prefills(layer)  # After the first's: a prompt may go on from one to the other.
        second.wait()
        second.post_attention(layer)
        if layer + 1 < num_layers:
            second.pre_attention(layer + 1)
            second.submit()
        first.attend_decodes(layer)
        first.wait()
        first.post_attention(layer)


def run_beside_cohort(stage: Stage | None, cohort: Stage, cohort_layers: range, num_layers: int) -> None:
    """Takes a sub-batch, if there is one, through all layers and meanwhile a cohort through some.

    Nothing of the cohort is in flight afterwards; its `hidden` is that of its last layer here.
    """
    for turn, cohort_layer in enumerate(cohort_layers):
        cohort.pre_attention(cohort_layer)
        cohort.submit()
        if stage is not None:
            for layer in range(*_turn(turn, len(cohort_layers), num_layers)):
                _run_layer(stage, layer)
        cohort.wait()
        cohort.post_attention(cohort_layer)


def beside_cohort(cohort_layers: range, num_layers: int) -> Iterator[int]:
    """Layers of a sub-batch and a cohort together, in the order in which `run_beside_cohort` first needs them."""
    for turn, cohort_layer in enumerate(cohort_layers):
        yield cohort_layer
        yield from range(*_turn(turn, len(cohort_layers), num_layers))


def _turn(turn: int, num_turns: int, num_layers: int) -> tuple[int, int]:
    """Of the sub-batch's layers the first beside a cohort's layer, and the first after it."""
    return turn * num_layers // num_turns, (turn + 1) * num_layers // num_turns


def _run_layer(stage: Stage, layer: int) -> None:
    """One sub-batch by itself."""
    stage.pre_attention(layer)
    stage.submit()
    stage.attend_prefills(layer)
    stage.attend_decodes(layer)
    stage.wait()
    stage.post_attention(layer)


def outputs(stages: list[Stage]) -> Tensor:
    """[num_outputs, hidden_size]: last hidden states of the rows that yield a token, in the plan's order."""
    return torch.cat([stage.hidden[stage.batch.output_rows] for stage in stages])
