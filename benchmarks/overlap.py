"""How well the pipeline keeps both processors at work, from timestamps of both processes.

The executor of gpu_svc runs in this process, on one core, with a real cpu_attn_svc on another. Two sub-batches of CPU
decodes take turns, or a cohort goes beside a batch of GPU decodes; contexts on the host are made as long as it takes
for attention on the CPU to last as long as the layers' work here. Then an iteration should last no longer than the
longer side: what it lasts beyond is bubbles and hops.

    python benchmarks/overlap.py [--sequences 8,16] [--iterations 30] [--dtype auto] [--publish]
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import results
import torch

from gpu_svc.__main__ import make_executor
from gpu_svc.cpu_attention_client import CpuAttentionUnavailableError, attach_pool, region_shape
from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostTier
from gpu_svc.limits import Limits
from neoflex.trace.picture import draw
from neoflex.trace.summary import summarize, times_of
from svc_common.config import parse
from svc_common.plan import CohortStep, IterationPlan, Mode, NewSequence, SubBatch, Tier
from svc_common.trace import COHORT, IterationTrace, TraceEvent, TraceKind

TARGET = 1.10
POOL_BYTES = 1536 * 2**20
WARM_UP = 5
"""Iterations before those that count."""
BATCH_TOKENS = 64
"""Contexts on the GPU beside a cohort."""
LAYERS_A_TURN = 3
"""Layers of the batch for each of the cohort."""
BALANCED = 0.05
"""Sides that differ by less are balanced."""
ABOUT = (
    "Iteration time over the longer side's, both sides balanced and on one core each: 1 is perfect overlap. A side is "
    "the time its process works, its waits for the other excluded; balanced, they last equally long over the layers. "
    "*Iteration*: start to end, with what comes before and after the layers, beside which the CPU has nothing to do. "
    "*Layer*: from one layer to the next; that of a cohort stands beside three of the batch's. Bubbles: the rest of "
    "each side, GPU then CPU. Medians over iterations and over all their layers.\n\n"
    "![Some iterations, and three layers of one](performance/overlap.png)"
)


@dataclass(frozen=True)
class Sides:
    """Of one iteration, or of one layer. Seconds."""

    total_s: float
    gpu_s: float
    cpu_s: float

    @property
    def ratio(self) -> float:
        return self.total_s / max(self.gpu_s, self.cpu_s)


def of_layers(trace: IterationTrace) -> list[Sides]:
    """Each layer but the last: from sub-batch 0's start in it, or the cohort's, to the same in the next one."""
    paced_by = COHORT if trace.mode is Mode.DECOUPLED else 0
    gpu, cpu = ([e for e in trace.events(*of) if not e.kind.is_bubble] for of in ((trace.gpu,), trace.cpu))
    starts = [e.start_ns for e in gpu if e.kind is TraceKind.PRE_ATTENTION and e.sub_batch == paced_by]
    return [
        Sides((end - start) / 1e9, *(_busy_s(side, start, end) for side in (gpu, cpu)))
        for start, end in pairwise(starts)
    ]


def _busy_s(events: Sequence[TraceEvent], start_ns: int, end_ns: int) -> float:
    """Of the time between."""
    return sum(max(0, min(event.end_ns, end_ns) - max(event.start_ns, start_ns)) for event in events) / 1e9


def of_iteration(trace: IterationTrace) -> list[Sides]:
    times = times_of(trace)
    return [Sides(times.total_ns / 1e9, times.gpu_busy_ns / 1e9, times.cpu_busy_ns / 1e9)]


class Rig:
    """An open epoch with sequences whose decodes the CPU attends, and what else an iteration of the mode needs."""

    def __init__(self, executor: Executor, mode: Mode, num_sequences: int) -> None:
        """`num_sequences` in each sub-batch and in a cohort. The executor has an open epoch that has run nothing."""
        self._executor = executor
        self._mode = mode
        assert executor._epoch is not None
        assert executor._epoch.host is not None
        self._table, host = executor._epoch.table, executor._epoch.host
        num_on_host = num_sequences * (2 if mode is Mode.ASYMMETRIC else 1)
        blocks_each = host.num_blocks // num_on_host
        block_tokens, spec = executor.kv_shape.block_tokens, executor.decoder.spec
        self.max_context_tokens = min(blocks_each * block_tokens, spec.context_tokens)
        # Any numbers cost the same; those of an unused pool might lie in one page.
        host.pool(0).blocks.elements[:] = 0.01
        self._num_layers = spec.num_layers // LAYERS_A_TURN
        self._next_layer = 0
        self._on_host = tuple(range(num_on_host))
        self._on_gpu = tuple(range(num_on_host, 2 * num_sequences))
        self._run(
            Mode.GPU_ONLY,
            new_sequences=(
                *_sequences(self._on_host, Tier.HOST, blocks_each),
                *_sequences(self._on_gpu, Tier.GPU, BATCH_TOKENS // block_tokens),
            ),
        )
        self._contexts = {Tier.GPU: self._table.slots(self._on_gpu), Tier.HOST: self._table.slots(self._on_host)}

    def run(self, context_tokens: int, num_iterations: int) -> list[IterationTrace]:
        """Iterations over sequences of this length on the host."""
        traces = []
        for _ in range(num_iterations):
            # As if so much had been computed: what stands in the pool makes no difference.
            self._table.computed_tokens[self._contexts[Tier.HOST]] = context_tokens - 1
            self._table.computed_tokens[self._contexts[Tier.GPU]] = BATCH_TOKENS - 1
            traces.append(self._run(self._mode, **self._work()))
        return traces

    def _work(self) -> dict[str, object]:
        if self._mode is Mode.ASYMMETRIC:
            half = len(self._on_host) // 2
            halves = self._on_host[:half], self._on_host[half:]
            return {"sub_batches": tuple(SubBatch(cpu_decodes=ids) for ids in halves)}
        start_layer = self._next_layer
        self._next_layer = (start_layer + self._num_layers) % self._executor.decoder.spec.num_layers
        return {
            "sub_batches": (SubBatch(gpu_decodes=self._on_gpu),),
            "cohort": CohortStep(self._on_host, start_layer, self._num_layers),
        }

    def _run(self, mode: Mode, **changes: object) -> IterationTrace:
        epoch = self._executor._epoch
        assert epoch is not None
        plan = IterationPlan(epoch.number, epoch.last_iteration + 1, mode, trace=True, **changes)  # type: ignore[arg-type]
        result = self._executor.run(plan)
        assert result.trace is not None, result.error_message
        return result.trace

    def balance(self) -> int:
        """Context length at which both sides last equally long over the layers."""
        context_tokens = 256
        for _ in range(8):
            traces = self.run(context_tokens, WARM_UP)
            # Layers are short: what disturbs a few of them leaves the median alone.
            sides = [side for trace in traces[1:] for side in of_layers(trace)]
            gpu_s, cpu_s = (statistics.median(getattr(side, name) for side in sides) for name in ("gpu_s", "cpu_s"))
            if abs(cpu_s / gpu_s - 1) < BALANCED:
                break
            context_tokens = int(min(max(context_tokens * gpu_s / cpu_s, 16), self.max_context_tokens))
        return context_tokens


def _sequences(ids: Sequence[int], tier: Tier, blocks_each: int) -> Iterator[NewSequence]:
    """With prompts of one token, in blocks of their own."""
    for number, sequence_id in enumerate(ids):
        yield NewSequence(sequence_id, (1,), tier, tuple(range(number * blocks_each, (number + 1) * blocks_each)))


@contextmanager
def cpu_attention(path: Path, core: int) -> Iterator[None]:
    """cpu_attn_svc with the configuration at `path`, on one core."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # Inherited.
    service = subprocess.Popen([sys.executable, "-m", "cpu_attn_svc", "--config", str(path)], stderr=subprocess.DEVNULL)
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        service.terminate()
        service.wait(10)


def open_epoch(executor: Executor, address: str, number: int, num_sequences: int) -> None:
    """With the host tier attached; the service may still be starting."""
    spec = executor.decoder.spec
    limits = Limits(2 * num_sequences, 2 * num_sequences, spec.context_tokens)
    shape = region_shape(executor.decoder, executor.kv_shape, limits)
    executor.close_epoch()
    for attempt in range(30):
        try:
            host = HostTier([asyncio.run(attach_pool(address, number, shape, executor.decoder))])
            break
        except CpuAttentionUnavailableError:
            if attempt == 29:
                raise
            time.sleep(0.5)
    executor.open_epoch(number, limits, host)


def row(what: str, sides: Sequence[Sides], target: float | None) -> results.Row:
    def median_ms(name: str) -> float:
        values: list[float] = [getattr(side, name) for side in sides]
        return statistics.median(values) * 1e3

    total, gpu, cpu = (median_ms(name) for name in ("total_s", "gpu_s", "cpu_s"))
    detail = (
        f"{total:.2f} ms, GPU side {gpu:.2f}, CPU side {cpu:.2f}; bubbles {1 - gpu / total:.1%}, {1 - cpu / total:.1%}"
    )
    return results.Row(
        measure=what,
        ratio=statistics.median(side.ratio for side in sides),
        ratio_of="time / longer side",
        target=target,
        at_least=False,
        detail=detail,
    )


def two_cores() -> tuple[int, int]:
    """Of those this process may use, not two threads of one core where it can be avoided."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("two cores are needed, one for each side")
    siblings = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list")
    shared = siblings.read_text().strip().replace("-", ",").split(",") if siblings.exists() else []
    return first, next((core for core in others if str(core) not in shared), others[0])


def measure(
    executor: Executor, address: str, all_sequences: Sequence[int], num_iterations: int
) -> tuple[list[results.Row], list[IterationTrace]]:
    """Rows of all numbers of sequences and of a cohort, and the last asymmetric iterations."""
    rows = []
    traces: list[IterationTrace] = []
    runs = [*((Mode.ASYMMETRIC, num) for num in all_sequences), (Mode.DECOUPLED, all_sequences[0])]
    for number, (mode, num_sequences) in enumerate(runs, start=1):
        open_epoch(executor, address, number, num_sequences)
        rig = Rig(executor, mode, num_sequences)
        context_tokens = rig.balance()
        traced = rig.run(context_tokens, WARM_UP + num_iterations)[WARM_UP:]
        what = f"2 x {num_sequences} sequences of {context_tokens} tokens"
        if mode is Mode.ASYMMETRIC:
            traces = traced
        else:
            what = f"a cohort of {num_sequences} sequences of {context_tokens} tokens beside {num_sequences} on the GPU"
        for part, sides_of, target in (("iteration", of_iteration, TARGET), ("layer", of_layers, None)):
            rows.append(row(f"{part}, {what}", [side for trace in traced for side in sides_of(trace)], target))
    executor.close_epoch()
    return rows, traces


def main() -> None:
    parser = results.arguments("Pipelined iteration time over the longer side's.")
    parser.add_argument("--sequences", type=lambda text: [int(n) for n in text.split(",")], default=[8, 16])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16", "fp16"))
    args = parser.parse_args()
    gpu_core, cpu_core = two_cores()
    with tempfile.TemporaryDirectory(prefix="nfx-") as directory:
        path, address = Path(directory) / "config.toml", f"unix:{directory}/cpu.sock"
        path.write_text(f'[cpu_attn]\nlisten = "{address}"\nkv_bytes = {POOL_BYTES}\nnum_threads = 1\n')
        gpu = {"device": "cpu", "dtype": args.dtype, "kv_bytes": "64MiB", "num_threads": 1}
        with cpu_attention(path, cpu_core):
            os.sched_setaffinity(0, {gpu_core})
            torch.set_num_threads(1)
            executor = make_executor(parse({"gpu": gpu}, "benchmark"))
            rows, traces = measure(executor, address, args.sequences, args.iterations)
    results.publish("overlap", "Overlap", "make bench-overlap", ABOUT, rows, args.publish)
    if args.publish:
        draw(traces, summarize(traces), results.RESULTS / "overlap.png")


if __name__ == "__main__":
    main()
