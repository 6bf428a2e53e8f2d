"""Runs the layers of one iteration so that both processors work at once; where the overlap is.

Two sub-batches, layer i. Both hold prefill chunks and CPU decodes, sub-batch 0 all GPU decodes. Read down; what stands
side by side runs at the same time (NEO, MLSys 2025, section 3):

    GPU                                              CPU
    post 0 [i-1], pre 0 [i], attend prefills [i]     attend 1 [i]
    post 1 [i], pre 1 [i+1], attend decodes 0 [i]    attend 0 [i]

The CPU gets its work in the order 1, 0, 1, 0, ... and may run ahead: 1 [i+1] is submitted before 0 [i] is waited for.
"""

import torch
from torch import Tensor

from gpu_svc.batch import Batch
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from gpu_svc.model.decoder import Decoder


class Stage:
    """One sub-batch on its way through the layers. Methods are called in the order in which they stand here."""

    def __init__(self, batch: Batch, decoder: Decoder, cache: GpuKvCache, host: HostTier | None) -> None:
        self.batch = batch
        self._decoder = decoder
        self._cache = cache
        self._host = host
        self._rotary = decoder.rotary(batch.positions)
        spec = decoder.spec
        self.hidden = decoder.embed(batch.token_ids)  # [n, hidden_size]
        self._q = self._kv = torch.empty(0)  # [n, num_q_heads, head_dim], [n, 2, num_kv_heads, head_dim]
        self._attended = torch.empty(
            (batch.num_tokens, spec.num_q_heads, spec.head_dim), dtype=decoder.dtype, device=decoder.device
        )

    def pre_attention(self, layer: int) -> None:
        """Computes q, k and v, and stores k and v of tokens whose sequence is on the GPU."""
        batch = self.batch
        self._q, self._kv = self._decoder.pre_attention(layer, self.hidden, self._rotary)
        if len(batch.gpu_kv_rows):
            self._cache.write(layer, batch.gpu_kv_rows, self._kv[batch.gpu_kv_tokens])

    def submit(self) -> None:
        """Hands the CPU its decodes; it stores their k and v itself."""
        batch = self.batch
        if self._host and len(batch.cpu_work):
            rows = batch.cpu_decode_rows
            self._host.submit(batch.cpu_work.slot, self._q[rows], self._kv[rows])

    def attend_prefills(self, layer: int) -> None:
        """Chunks of host sequences leave their K and V in the host pool, layer by layer, none on the GPU."""
        for chunk in self.batch.chunks:
            q, out = self._q[chunk.rows], self._attended[chunk.rows]
            if not chunk.on_host:
                chunk.attention.run_paged(q, self._cache.blocks[layer], out)
                continue
            assert self._host is not None  # Host sequences exist only with a host tier.
            self._host.write(layer, chunk.host_rows, self._kv[chunk.rows])
            past = self._host.read(layer, chunk.past_blocks)[:, :, : chunk.num_past_tokens].to(q.device)
            # Rounded to the KV type like the past, so that cutting a prompt elsewhere changes nothing.
            own = self._kv[chunk.rows].permute(1, 2, 0, 3).to(past.dtype)
            chunk.attention.run_dense(q, torch.cat([past, own], dim=2), out)

    def attend_decodes(self, layer: int) -> None:
        batch = self.batch
        if batch.gpu_decode is not None:
            rows = batch.gpu_decode_rows
            batch.gpu_decode.run(self._q[rows], self._cache.blocks[layer], self._attended[rows])

    def wait(self) -> None:
        """Until the CPU has attended what was submitted last."""
        batch = self.batch
        if self._host and len(batch.cpu_work):
            self._host.wait(batch.cpu_work.slot, self._attended[batch.cpu_decode_rows])

    def post_attention(self, layer: int) -> None:
        self.hidden = self._decoder.post_attention(layer, self._attended, self.hidden)


def run_layers(first: Stage, second: Stage | None, num_layers: int) -> None:
    """Takes one or two sub-batches through all layers; afterwards `hidden` of each is the last layer's."""
    if second is None:
        for layer in range(num_layers):
            first.pre_attention(layer)
            first.submit()
            first.attend_prefills(layer)
            first.attend_decodes(layer)
            first.wait()
            first.post_attention(layer)
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


def outputs(stages: list[Stage]) -> Tensor:
    """[num_outputs, hidden_size]: last hidden states of the rows that yield a token, in the plan's order."""
    return torch.cat([stage.hidden[stage.batch.output_rows] for stage in stages])
