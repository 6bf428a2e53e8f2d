"""Measures each operation once per start, on the epoch's own caches and through the real tensor plane.

Runs before the epoch's first plan, when no block holds anything. A grid ends early where a point takes long: beyond
it, time is linear in what still grows, and start-up must not take minutes.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.attention import AttentionBackend, DecodeAttention
from gpu_svc.batch_builder import BatchBuilder
from gpu_svc.cpu_layer_profiler import CpuLayerProfiler
from gpu_svc.cpu_trip import CpuTrip, cpu_trip, noise
from gpu_svc.graphs import Graphs, Ready
from gpu_svc.host_tier import HostPool, HostTier
from gpu_svc.kv_cache import GpuKvCache, KvPlaces
from gpu_svc.limits import Int32Array, Limits
from gpu_svc.link import Link
from gpu_svc.lower_pool import LowerTables
from gpu_svc.measured import lesser, points, steps
from gpu_svc.packed_arrays import to_device
from gpu_svc.pipeline import Stage, outputs, run_layers
from gpu_svc.sampling import SamplingRows, sample
from gpu_svc.sequences import SequenceTable
from gpu_svc.stopwatch import LONG_S, Stopwatch
from gpu_svc.tables import Tables
from gpu_svc.transfer_profiler import link_bytes_per_s, swap_bytes_per_s
from svc_common.decoder.decoder import Decoder, Workspace
from svc_common.model.spec import LayerSpec
from svc_common.plan import IterationPlan, Mode, NewSequence, Sampling, SubBatch, Tier
from svc_common.policy import ExecutionPolicy

_NO_CPU_LAYERS = ExecutionPolicy(resident_layers=0)
_FACTOR_POINTS = 3
_ITERATION_SEQUENCES = 4  # A point of all tables, as is 1.


class NonFiniteLogitsError(Exception):
    """The model computes NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Profiler:
    """Over the parts of one epoch."""

    limits: Limits
    decoder: Decoder
    cache: GpuKvCache
    host: HostTier | None
    backend: AttentionBackend
    link: Link
    policy: ExecutionPolicy
    graphs: Graphs | None = None
    """With these, decodes are measured as parts of what is replayed."""

    @property
    def _watch(self) -> Stopwatch:
        return Stopwatch(self.decoder.device)

    @property
    def _pools(self) -> tuple[HostPool | None, ...]:
        return self.host.pools if self.host else ()

    @property
    def _pool(self) -> HostPool | None:
        """The first that is attached: attention on the CPU is measured with its service."""
        return next((pool for pool in self._pools if pool), None)

    def facts(self) -> dict[str, object]:
        """All of this epoch that the tables depend on.

        CPU attention services are measured with the threads that they have at that time; where one gets others later,
        online calibration follows.
        """
        decoder, shape, device = self.decoder, self.cache.shape, self.decoder.device
        return {
            "model": asdict(decoder.spec),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "weight_dtype": str(decoder.weight_dtype),
            "dtype": str(decoder.dtype),
            "kv_dtype": str(shape.dtype),
            "host_kv_dtype": str(shape.host_dtype),
            "block_tokens": shape.block_tokens,
            "gpu_blocks": self.cache.num_blocks,
            "host_pools": [(pool.num_blocks, pool.num_threads) if pool else None for pool in self._pools],
            "limits": asdict(self.limits),
            "captured_decodes": self.graphs.most_decodes if self.graphs else 0,
            "cpu_layers": [self.policy.prefill_cpu_layers, self.policy.decode_cpu_layers],
        }

    @torch.inference_mode()
    def measure(self) -> Tables:
        """Everything twice, and the lesser counts: a stall must not spoil a point, least of all one that is kept."""
        linear, head = lesser(self._linear), lesser(self._head)
        prefill, decode = lesser(self._prefill), lesser(self._gpu_decode)
        pool = self._pool
        trips = [*self._cpu_trips(pool), *self._cpu_trips(pool)] if pool else []
        attention = lesser(lambda: ((t.num_sequences, t.context_tokens, t.attention_s) for t in trips))
        cpu_linear: dict[tuple[int, ...], float] = {}
        cpu_prefill: dict[tuple[int, ...], float] = {}
        if layers := self._cpu_layers():
            cpu_linear, cpu_prefill = lesser(layers.linear), lesser(layers.prefill)
            # Where no layer is left above, attention is measured in these.
            attention = attention or lesser(layers.decode)
        copies = lesser(lambda: ((t.num_sequences, t.copy_s) for t in trips))
        return Tables(
            linear=points(linear),
            prefill=points(prefill),
            gpu_decode=points(decode),
            cpu_decode=points(attention),
            head=points(head),
            swap_bytes_per_s=swap_bytes_per_s(self.host, self.cache, self.link, self.policy, self.decoder),
            iteration_s=self._iteration_s(linear, decode, head),
            cpu_copy=points(copies),
            link_bytes_per_s=link_bytes_per_s(self.link, self.decoder.device),
            cpu_signal_s=statistics.median(trip.signal_s for trip in trips) if trips else 0.0,
            cpu_pool_factors=tuple(map(self._pool_factor, self._pools)) if len(self._pools) > 1 else (),
            cpu_linear=points(cpu_linear),
            cpu_prefill=points(cpu_prefill),
        )

    @property
    def _gpu_layers(self) -> range:
        """That the executor computes of anything."""
        return range(self.policy.prefill_cpu_layers, self.decoder.spec.num_layers)

    @property
    def _upper_layers(self) -> range:
        """That the executor computes of everything, and whose KV is in the tiers' own pools."""
        return range(self.policy.decode_cpu_layers, self.decoder.spec.num_layers)

    def _cpu_layers(self) -> CpuLayerProfiler | None:
        if self.host is None or self.policy.decode_cpu_layers == 0:
            return None
        pool = self.host.only_pool
        return CpuLayerProfiler(
            pool,
            self.policy.decode_cpu_layers,
            self.decoder.spec.hidden_size,
            self.cache.shape.block_tokens,
            self.cache.num_blocks + pool.num_blocks,
            self.limits,
        )

    def _linear(self) -> Iterator[tuple[int, float]]:
        """Layer after layer, so that weights come from memory as in an iteration; K and V are stored as well."""
        spec, device = self.decoder.spec, self.decoder.device
        for num_tokens in steps(1, self.limits.max_batch_tokens, 2) if self._gpu_layers else ():
            hidden = self._noise(num_tokens, spec.hidden_size)
            workspace = self.decoder.workspace(torch.arange(num_tokens, device=device))
            attended = self._noise(num_tokens, spec.num_q_heads, spec.head_dim)
            places = None
            if self.cache.num_blocks:
                # Each token to a block of its own, as those of decodes, as far as there are blocks.
                blocks = np.arange(num_tokens) % self.cache.num_blocks
                places = KvPlaces.on(device, blocks, np.zeros(num_tokens, np.int64))
            run = partial(self._run_linear, hidden, workspace, attended, places)
            yield num_tokens, self._layer_s(run, num_decodes=num_tokens)

    def _run_linear(
        self, hidden: Tensor, workspace: Workspace, attended: Tensor, places: KvPlaces | None, layer: int
    ) -> None:
        self.decoder.pre_attention(layer, hidden, workspace)
        if places is not None and layer >= self.cache.first_layer:
            self.cache.write(layer, places, workspace.kv)
        self.decoder.post_attention(layer, attended, hidden)

    def _prefill(self) -> Iterator[tuple[int, int, float]]:
        spec, block_tokens = self.decoder.spec, self.cache.shape.block_tokens
        longest = min(self.limits.max_batch_tokens, self.limits.max_sequence_tokens)
        if self.cache.num_blocks and self._upper_layers:
            layer_blocks = self.cache.blocks[0]
        else:
            layer_blocks = self._noise(1, *self.cache.blocks.shape[2:]).to(self.cache.shape.dtype)
        for chunk_tokens in steps(1, longest, 4) if self._gpu_layers else ():
            q = self._noise(chunk_tokens, spec.num_q_heads, spec.head_dim)
            out = torch.empty_like(q)
            most_past = self.limits.max_sequence_tokens - chunk_tokens
            for past_tokens in (0, *steps(min(256, most_past), most_past, 4)) if most_past else (0,):
                num_blocks = -(-(past_tokens + chunk_tokens) // block_tokens)
                # More blocks than there are: repeated ones cost the same.
                blocks = (np.arange(num_blocks) % len(layer_blocks)).astype(np.int32)
                attention = self.backend.prefill(past_tokens, chunk_tokens, blocks)
                seconds = self._layer_s(partial(attention.run, q=q, layer_blocks=layer_blocks, out=out))
                yield chunk_tokens, past_tokens, seconds
                if seconds > LONG_S:
                    break

    def _gpu_decode(self) -> Iterator[tuple[int, int, float]]:
        spec = self.decoder.spec
        if not self._upper_layers:
            return
        for num_sequences, context_tokens, tables in self._decode_grid(self.cache.num_blocks):
            q = self._noise(num_sequences, spec.num_q_heads, spec.head_dim)
            out = torch.empty_like(q)
            attention = self._decode_attention(np.full(num_sequences, context_tokens, np.int64), tables)
            run = partial(self._run_decode, attention, q, out)
            yield num_sequences, num_sequences * context_tokens, self._layer_s(run, self._upper_layers, num_sequences)

    def _decode_attention(self, context_tokens: NDArray[np.int64], tables: Int32Array) -> DecodeAttention:
        attend = self.backend.decode_on_device
        if attend is None or not self._is_replayed(len(tables)):
            return self.backend.decode(context_tokens, tables)
        context, there = to_device([context_tokens.astype(np.int32), tables], self.decoder.device)
        return attend(context, there, self.limits.max_sequence_tokens)

    def _is_replayed(self, num_decodes: int) -> bool:
        return self.graphs is not None and 0 < num_decodes <= self.graphs.most_decodes

    def _run_decode(self, attention: DecodeAttention, q: Tensor, out: Tensor, layer: int) -> None:
        attention.run(layer, q, self.cache.layer(layer), out)

    def _cpu_trips(self, pool: HostPool) -> Iterator[CpuTrip]:
        for load in self._decode_grid(pool.num_blocks) if self._upper_layers else ():
            yield cpu_trip(self.decoder, pool, *load)

    def _pool_factor(self, pool: HostPool | None) -> float:
        """Attention there in multiples of that in the first pool: the median of the largest loads that both hold."""
        first = self._pool
        if first is None or pool is None or pool is first:
            return 1.0
        loads = [*self._decode_grid(min(first.num_blocks, pool.num_blocks))][-_FACTOR_POINTS:]
        return statistics.median(
            cpu_trip(self.decoder, pool, *load).attention_s / cpu_trip(self.decoder, first, *load).attention_s
            for load in loads
        )

    def _decode_grid(self, num_blocks: int) -> Iterator[tuple[int, int, Int32Array]]:
        """(num_sequences, context tokens of each, block tables) up to what the tier holds."""
        block_tokens = self.cache.shape.block_tokens
        for num_sequences in steps(1, min(self.limits.max_sequences, self.limits.max_batch_tokens, num_blocks), 4):
            blocks_each = num_blocks // num_sequences
            longest = min(self.limits.max_sequence_tokens, blocks_each * block_tokens)
            for context_tokens in steps(min(block_tokens, longest), longest, 8):
                width = -(-context_tokens // block_tokens)
                tables = np.arange(num_sequences)[:, None] * blocks_each + np.arange(width)
                yield num_sequences, context_tokens, tables.astype(np.int32)

    def _head(self) -> Iterator[tuple[int, float]]:
        """With sampling at temperature 1, the default of requests."""
        for num_outputs in steps(1, min(self.limits.max_sequences, self.limits.max_batch_tokens), 2):
            hidden = self._noise(num_outputs, self.decoder.spec.hidden_size)
            rows = _default_rows(num_outputs)
            seconds = self._watch.least_s(partial(self._run_head, hidden, rows), self._run_layers)
            yield num_outputs, seconds

    def _run_layers(self) -> None:
        """One token through all layers: what caches held of anything else is gone."""
        spec = self.decoder.spec
        workspace = self.decoder.workspace(torch.zeros(1, dtype=torch.int64, device=self.decoder.device))
        hidden, attended = self._noise(1, spec.hidden_size), self._noise(1, spec.num_q_heads, spec.head_dim)
        for layer in self._gpu_layers:
            self._run_linear(hidden, workspace, attended, None, layer)

    def _run_head(self, hidden: Tensor, rows: SamplingRows) -> None:
        drawn = sample(self.decoder.logits(hidden), rows)
        if len(drawn.bad_rows) == len(hidden):
            raise NonFiniteLogitsError("the model computes NaN or infinity whatever it is given")

    def _iteration_s(
        self,
        linear: Mapping[tuple[int, ...], float],
        decode: Mapping[tuple[int, ...], float],
        head: Mapping[tuple[int, ...], float],
    ) -> float:
        """What an iteration of a few decodes takes beside what the tables say of it; taking its plan over, at least."""
        cache, watch = self.cache, self._watch
        most = min(self.limits.max_sequences, self.limits.max_batch_tokens, cache.num_blocks or _ITERATION_SEQUENCES)
        num = _ITERATION_SEQUENCES if most >= _ITERATION_SEQUENCES else 1
        context_tokens = min(cache.shape.block_tokens, self.limits.max_sequence_tokens)
        limits = Limits(num, num, context_tokens)
        table = SequenceTable(limits, cache.shape.block_tokens, num, (), self.decoder.spec.vocab_size)
        new = tuple(NewSequence(i, (0,), Tier.GPU, (i,), Sampling(temperature=1.0)) for i in range(num))
        table.apply(IterationPlan(1, 1, Mode.GPU_ONLY, new_sequences=new))
        table.prompt_tokens[:] = 0  # As if all of its tokens were generated.
        builder = BatchBuilder(table, self.backend, cache.shape, self.decoder.device, _NO_CPU_LAYERS, LowerTables(0))
        work = SubBatch(gpu_decodes=tuple(range(num)))
        plan = IterationPlan(1, 2, Mode.GPU_ONLY, sub_batches=(work,))

        def prepare() -> Stage | Ready:
            table.computed_tokens[:] = context_tokens - 1
            table.apply(plan)
            table.check_work(plan)
            ready = self.graphs.ready(plan.sub_batches, builder) if self.graphs else None
            return ready or Stage(builder.build(work, 0), self.decoder, cache, None)

        def run() -> None:
            prepared = prepare()
            if isinstance(prepared, Ready):
                prepared.run()
                slots, logits = prepared.batches[0].output_slots, prepared.logits
            else:
                run_layers(prepared, None, self.decoder.spec.num_layers)
                slots, logits = prepared.batch.output_slots, self.decoder.logits(outputs([prepared]))
            drawn = sample(logits, table.sampling.rows(slots))
            table.advance(work)
            table.take_tokens(slots, drawn.tokens)

        prepare_s = watch.least_s(prepare)
        if not cache.num_blocks or self.policy.decode_cpu_layers:
            return prepare_s
        layer_s = linear[num,] + decode[num, num * context_tokens]
        return max(prepare_s, watch.least_s(run) - self.decoder.spec.num_layers * layer_s - head[num,])

    def _noise(self, *shape: int) -> Tensor:
        return noise(self.decoder, *shape)

    def _layer_s(self, run: Callable[[int], object], layers: range | None = None, num_decodes: int = 0) -> float:
        """What `run` takes in one of `layers`, or of all that the executor computes, layer after layer; the mean, where
        they differ in windows or experts. Of so many decodes as part of a replay, where they are replayed.
        """
        spec = self.decoder.spec
        layers = layers or self._gpu_layers
        if self.graphs is not None and self._is_replayed(num_decodes):

            def run_all() -> None:
                for layer in layers:
                    run(layer)

            return self._watch.least_s(self.graphs.captured(run_all)) / len(layers)
        kinds: dict[LayerSpec, list[int]] = {}
        for layer in layers:
            kinds.setdefault(spec.layer(layer), []).append(layer)

        def kind_s(of_kind: list[int]) -> float:
            order = cycle(of_kind)
            return self._watch.least_s(lambda: run(next(order)))

        return sum(len(of_kind) * kind_s(of_kind) for of_kind in kinds.values()) / len(layers)


def _default_rows(num_rows: int) -> SamplingRows:
    return SamplingRows(
        temperature=np.ones(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.arange(num_rows, dtype=np.uint64),
        draw=np.zeros(num_rows, np.int64),
        num_logprobs=np.full(num_rows, -1, np.int32),
    )
