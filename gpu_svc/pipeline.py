"""Runs the layers of one iteration so that both processors work at once; where the overlap is.

Two sub-batches, layer i. Both hold prefill chunks and CPU decodes, sub-batch 0 all GPU decodes. Read down; what stands
side by side runs at the same time (NEO, MLSys 2025, section 3):

    GPU                                              CPU
    post 0 [i-1], pre 0 [i], attend prefills [i]     attend 1 [i]
    post 1 [i], pre 1 [i+1], attend decodes 0 [i]    attend 0 [i]

The CPU gets its work in the order 1, 0, 1, 0, ... and may run ahead: 1 [i+1] is submitted before 0 [i] is waited for.

With CPU layers (FlexInfer, MLSys 2025), X of them for decodes and P <= X for prompts, of L layers; p are a sub-batch's
prompts, d its decodes. All is handed over at the start:

    GPU                                      CPU
                                             p 0 [0 ... P-1], p 1 [0 ... P-1]
    p 0 [P ... X-1], p 1 [P ... X-1]         d 0 [0 ... X-1]
    all of 0 [X ... L-1]                     d 1 [0 ... X-1], between its layers attend CPU decodes of 0
    all of 1 [X ... L-1]                     attend CPU decodes of 1

With P = X a sub-batch's prompts and decodes pass the CPU layers together. Where sub-batch 1 has nothing to wait for, it
goes first, so that its work, too, lies beside the CPU's.

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
from gpu_svc.host_tier import HostPool, HostTier
from gpu_svc.kv_cache import GpuKvCache
from svc_common.decoder.decoder import Decoder
from svc_common.policy import ExecutionPolicy


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

    def pre_attention(self, layer: int) -> None:
        """Computes q, k and v, and stores k and v of tokens whose sequence is on the GPU."""
        self._await_weights(layer)
        batch = self.batch
        self._decoder.pre_attention(layer, self.hidden, self._workspace)
        if self._has_gpu_kv:
            self._cache.write(layer, batch.gpu_kv_places, self._kv[batch.gpu_kv_tokens])

    def _await_weights(self, layer: int) -> bool:
        """Whether they had to come. Blocks that were swapped have, too, from then on."""
        if self._host is not None:
            self._host.await_layer(layer)
        return self._decoder.await_layer(layer)

    def submit(self) -> None:
        """Hands the CPU its decodes, every service its own; it stores their k and v itself."""
        if self._host and self.batch.cpu_work:
            self._host.submit(self.batch.cpu_work, self._q, self._kv)

    def hand_over(self) -> None:
        """Puts hidden states in place for the CPU layers."""
        for part in (self.batch.prompt_pass, self.batch.last_pass):
            if part is not None:
                assert self._host is not None
                self._host.only_pool.put_hidden(part.work, self.hidden[part.rows])

    def begin_prompts(self) -> None:
        """Waits until the prompts are through the layers before those that the CPU computes for decodes only."""
        batch = self.batch
        if batch.prompt_pass is not None:
            assert self._host is not None
            self._host.only_pool.take_hidden(batch.prompt_pass.work, self.hidden[batch.prompt_rows])
        self._prompt_hidden = self.hidden[batch.prompt_rows]
        self._prompt_workspace = self._decoder.workspace(batch.positions[batch.prompt_rows])

    def run_prompts(self, layer: int) -> None:
        """Takes the prompts through such a layer; their KV goes to the lower pool."""
        assert self._host is not None
        pool = self._host.only_pool
        workspace, attended = self._prompt_workspace, self._attended[self.batch.prompt_rows]
        self._await_weights(layer)
        self._decoder.pre_attention(layer, self._prompt_hidden, workspace)
        for chunk in self.batch.chunks:
            assert chunk.lower_attention is not None
            assert chunk.lower_places is not None
            q, kv = workspace.q[chunk.rows], workspace.kv[chunk.rows]
            pool.write(layer, chunk.lower_places, kv)
            chunk.lower_attention.run_on_host(layer, q, pool.layer(layer), kv, attended[chunk.rows])
        self._prompt_hidden = self._decoder.post_attention(layer, attended, self._prompt_hidden)

    def end_prompts(self) -> None:
        self.hidden[self.batch.prompt_rows] = self._prompt_hidden

    def take_over(self) -> None:
        """Waits until the CPU layers are done with what they had last."""
        part = self.batch.last_pass
        if part is not None:
            assert self._host is not None
            self._host.only_pool.take_hidden(part.work, self.hidden[part.rows])

    def attend_prefills(self, layer: int) -> None:
        """Chunks of host sequences leave their K and V in the host pool, layer by layer, none on the GPU."""
        for chunk in self.batch.chunks:
            q, out = self._q[chunk.rows], self._attended[chunk.rows]
            if not chunk.on_host:
                chunk.attention.run(layer, q, self._cache.layer(layer), out)
                continue
            assert self._host is not None  # Host sequences exist only with a host tier.
            kv = self._kv[chunk.rows]
            pool = self._host.pool(chunk.pool)
            pool.write(layer, chunk.host_places, kv)
            chunk.attention.run_on_host(layer, q, pool.layer(layer), kv, out)

    def attend_decodes(self, layer: int) -> None:
        if self.batch.gpu_decode is not None:
            self.batch.gpu_decode.run(layer, self._gpu_q, self._cache.layer(layer), self._gpu_attended)

    def wait(self) -> None:
        """Until the CPU has attended what was submitted last."""
        if self._host and self.batch.cpu_work:
            self._host.wait(self.batch.cpu_work, self._attended)

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


def run_above_cpu_layers(
    stages: list[Stage], pool: HostPool, policy: ExecutionPolicy, num_layers: int, in_turn: bool
) -> None:
    """Takes sub-batches, in this order, through all layers, of which the CPU computes the first.

    `in_turn`: each through all upper layers by itself, as drawn above; else layer by layer, so that weights that are
    streamed come once.
    """
    for stage in stages:
        stage.hand_over()
    pool.submit_layers()
    with_prompts = [stage for stage in stages if stage.batch.chunks]
    prompt_layers = range(policy.prefill_cpu_layers, policy.decode_cpu_layers)
    upper_layers = range(policy.decode_cpu_layers, num_layers)
    if prompt_layers:
        for stage in with_prompts:
            stage.begin_prompts()
        for layer in prompt_layers:
            for stage in with_prompts:
                stage.run_prompts(layer)
        for stage in with_prompts:
            stage.end_prompts()
    for together in [[stage] for stage in stages] if in_turn else [stages]:
        for stage in together:
            stage.take_over()
        for layer in upper_layers:
            for stage in together:
                _run_layer(stage, layer)


def layers_in_order(stages: list[Stage], policy: ExecutionPolicy, num_layers: int) -> range:
    """That the executor computes of these sub-batches, in the order in which they are first needed."""
    if not stages:
        return range(0)
    has_prompts = any(stage.batch.chunks for stage in stages)
    return range(policy.prefill_cpu_layers if has_prompts else policy.decode_cpu_layers, num_layers)


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
