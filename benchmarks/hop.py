"""What a layer's hop to the CPU attention service costs, from q, k and v ready to `out` usable.

Two real processes over a real region: this one submits and waits as gpu_svc does, the other serves the region as
cpu_attn_svc does. The attention is as small as it gets, so that what remains is the hop; the worker's own compute time,
as it reports it, is taken off. Both sides' waits are part of a round trip.

    spinning  the next submit follows at once, so both waits fall into the spin window
    sleeping  pauses of random length before each submit, so the worker sleeps and must be woken
    regular   the same pause before each submit: the worker wakes by itself just before
    polled    as where a device rings, which wakes nobody: the worker looks by itself

Beside them in the same run: round trips of pyzmq over ipc with the same pauses, and the hops of the default model's
iterations: this process runs gpu_svc's executor, beside it the real cpu_attn_svc, one thread each. All decodes are one
sub-batch on the host, so nothing hides a hop: hops are what the executor waits for beyond what the worker computes, the
iteration's report included. Last, how long the thread pool takes to start a run on all threads and to see its end.
"""

import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import zmq
from results import Row, arguments, publish

from cpu_attn_svc.session import RegionSession
from cpu_attn_svc.totals import Totals
from gpu_svc.cpu_attention_client import attach_pool, region_shape
from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostPool, HostTier
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from svc_common.cpu_kernels import ThreadPool
from svc_common.decoder.checkpoint import open_model
from svc_common.decoder.load import load_decoder
from svc_common.model.store import resolve
from svc_common.plan import IterationPlan, IterationResult, Mode, NewSequence, PrefillChunk, SubBatch, Tier
from svc_common.tensor_plane import CpuSubBatch, RegionShape, Segment, TensorPlane

# 1 sequence of 1 token and 1 head: nothing to compute.
SHAPE = RegionShape(
    num_layers=250,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=8,
    block_tokens=1,
    kv_dtype="fp32",
    exchange_dtype="fp32",
    max_sequences=1,
    softmax_scale=1.0,
)
WARM_UP_HOPS = 20
NUM_PAIRS = 5
BLOCK_TOKENS = 16
PROMPT_TOKENS = 128
Pause = Callable[[], None]
ABOUT = (
    "From q, k and v ready in the executor to the attention usable there, less the worker's computing. "
    "*spinning*: the next submit follows at once; *sleeping*: pauses of 1 to 3 ms, random; *regular*: pauses of 2 ms; "
    "*polled*: pauses as of *sleeping*, of a worker that is not woken but looks. "
    "The last rows are iterations of the default model with all decodes on the host in one sub-batch, so that nothing "
    "hides a hop: the executor's waits, less the same."
)


@dataclass(frozen=True)
class Times:
    """Microseconds of single round trips."""

    sorted_us: tuple[float, ...]

    @classmethod
    def of(cls, ns: Sequence[float]) -> "Times":
        return cls(tuple(sorted(value / 1e3 for value in ns)))

    def at(self, share: float) -> float:
        return self.sorted_us[min(len(self.sorted_us) - 1, int(share * len(self.sorted_us)))]


@dataclass(frozen=True)
class Summary:
    """Medians over pairs of processes: a virtual machine's cores are faster at one time than at another."""

    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, runs: Sequence[Times]) -> "Summary":
        return cls(statistics.median(run.at(0.5) for run in runs), statistics.median(run.at(0.99) for run in runs))

    def __str__(self) -> str:
        return f"p50 {self.p50_us:.2f} us, p99 {self.p99_us:.2f} us"


def serve_region(pipe: Connection, cpu: int | None) -> None:
    """The other process: a region with its session, and a ZeroMQ socket that sends back what it gets."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hop-") as directory:
        segment = Segment.create(Path(directory), 1, SHAPE, SHAPE.block_bytes)
        session = RegionSession(segment, "auto", ThreadPool(1), Totals())
        session.start()
        echo: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        echo.bind(f"ipc://{directory}/echo")
        pipe.send((segment.path, segment.endpoint, f"ipc://{directory}/echo"))
        while message := echo.recv():
            echo.send(message)
        echo.close()
        session.close()


@contextmanager
def two_processes(cpus: tuple[int, int] | None) -> Iterator[tuple[TensorPlane, "zmq.Socket[bytes]"]]:
    """The executor's end of both ways to talk; pinned to a CPU each where `cpus` says so."""
    allowed = os.sched_getaffinity(0)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve_region, args=(there, cpus[1] if cpus else None))
    process.start()
    there.close()  # Else its death would not end the wait.
    path, endpoint, echo_endpoint = here.recv()
    if cpus:
        os.sched_setaffinity(0, {cpus[0]})
    plane = TensorPlane.attach(path, endpoint, 1, SHAPE)
    echo: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    echo.connect(echo_endpoint)
    try:
        yield plane, echo
    finally:
        echo.send(b"")
        echo.close()
        plane.close()
        process.join()
        os.sched_setaffinity(0, allowed)


class Hops:
    """Iterations over one region, one after the other."""

    def __init__(self, plane: TensorPlane) -> None:
        self._plane = plane
        self._host = HostPool(plane, 1)
        self._iteration = 0
        self._batch = CpuSubBatch(0, np.array([1], np.int32), np.array([[0]], np.int32))
        self._q = torch.zeros(1, 1, 8)
        self._kv = torch.zeros(1, 2, 1, 8)

    def run(self, pause: Pause, num_iterations: int, polled: bool) -> list[float]:
        """Nanoseconds of each layer's hop, less what the worker computes, by its least disturbed iteration."""
        iterations = [self._run_iteration(pause, polled) for _ in range(num_iterations)]
        compute_ns = min(compute_ns for _, compute_ns in iterations)
        return [value - compute_ns for times, _ in iterations for value in times]

    def _run_iteration(self, pause: Pause, polled: bool) -> tuple[list[int], float]:
        """Nanoseconds of each layer's round trip, and the mean of what the worker computed in a layer."""
        host, q, kv, rows = self._host, self._q, self._kv, slice(0, 1)
        self._iteration += 1
        self._plane.begin(self._iteration, [self._batch], 0, device_rings=polled)
        times = []
        for _ in range(SHAPE.num_layers):
            pause()
            start = time.perf_counter_ns()
            host.submit(0, q, kv, rows)
            host.wait(0, q, rows)
            times.append(time.perf_counter_ns() - start)
        return times[WARM_UP_HOPS:], host.finish().compute_ns / SHAPE.num_layers


def echo_times(echo: "zmq.Socket[bytes]", pause: Pause, num: int) -> list[int]:
    """Nanoseconds of round trips of 64 bytes."""
    times = []
    for _ in range(num):
        pause()
        start = time.perf_counter_ns()
        echo.send(bytes(64))
        echo.recv()
        times.append(time.perf_counter_ns() - start)
    return times


def pauses(shortest_s: float, longest_s: float) -> Pause:
    """Keeps this core busy, as the executor's own work would."""
    random = np.random.default_rng(0)

    def pause() -> None:
        end = time.perf_counter() + random.uniform(shortest_s, longest_s)
        while time.perf_counter() < end:
            pass

    return pause


@contextmanager
def attention_service() -> Iterator[str]:
    """The real cpu_attn_svc with a thread; its address."""
    with tempfile.TemporaryDirectory(prefix="nfx-") as directory:
        address = f"unix:{directory}/control"
        config = Path(directory) / "config.toml"
        config.write_text(f'[cpu_attn]\nlisten = "{address}"\nkv_bytes = "512MiB"\nnum_threads = 1\n')
        command = [sys.executable, "-m", "cpu_attn_svc", "--config", str(config)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                while not Path(directory, "control").exists():
                    time.sleep(0.01)
                yield address
            finally:
                process.terminate()


def host_iterations(address: str, num_sequences: int, num_iterations: int) -> list[IterationResult]:
    """Decode iterations of the default model, its prompts random and on the host."""
    torch.set_num_threads(1)
    spec, checkpoint = open_model(resolve("smollm2-135m-instruct"))
    decoder = load_decoder(checkpoint, spec, torch.float32, torch.device("cpu"))
    shape = KvShape.of(spec, BLOCK_TOKENS, decoder.dtype)
    limits = Limits(max_sequences=num_sequences, max_batch_tokens=PROMPT_TOKENS, max_sequence_tokens=1024)
    executor = Executor(decoder, shape, 0)
    pool = asyncio.run(attach_pool(address, 1, region_shape(decoder, shape, limits), decoder))
    executor.open_epoch(1, limits, HostTier([pool]))
    random = np.random.default_rng(0)
    stride = -(-(PROMPT_TOKENS + num_iterations + 1) // BLOCK_TOKENS)
    plans: list[tuple[tuple[NewSequence, ...], SubBatch]] = []
    for i in range(num_sequences):
        prompt = tuple(random.integers(100, spec.vocab_size, PROMPT_TOKENS).tolist())
        blocks = tuple(range(i * stride, (i + 1) * stride))
        chunk = SubBatch(prefills=(PrefillChunk(i, 0, PROMPT_TOKENS),))
        plans.append(((NewSequence(i, prompt, Tier.HOST, blocks),), chunk))
    plans += [((), SubBatch(cpu_decodes=tuple(range(num_sequences))))] * num_iterations
    results = []
    for number, (new, sub_batch) in enumerate(plans, start=1):
        plan = IterationPlan(1, number, Mode.ASYMMETRIC, new_sequences=new, sub_batches=(sub_batch,))
        results.append(executor.run(plan))
        assert results[-1].error is None, results[-1].error_message
    executor.close_epoch()
    return results[num_sequences + WARM_UP_HOPS :]


def service_row(num_sequences: int, num_iterations: int) -> Row:
    """Hops of real iterations."""
    with attention_service() as address:
        timings = [result.timings for result in host_iterations(address, num_sequences, num_iterations)]
    hops_ns = [t.cpu_wait_ns - t.cpu_attention_ns for t in timings]
    share = statistics.median(hop / t.total_ns for hop, t in zip(hops_ns, timings, strict=True))
    hop_ms, total_ms = statistics.median(hops_ns) / 1e6, statistics.median(t.total_ns for t in timings) / 1e6
    return Row(
        f"hops of 30 layers, real services, {num_sequences} decodes",
        share,
        "hops / iteration",
        0.03 if num_sequences == 32 else None,
        at_least=False,
        detail=f"{hop_ms:.2f} of {total_ms:.1f} ms",
    )


def hop_rows(cpus: tuple[int, int] | None, where: str, scale: int) -> Iterator[Row]:
    """`where` the two processes run, in words; targets hold where each has a core of its own."""
    kinds: dict[str, tuple[Pause, int, tuple[float | None, float | None]]] = {
        "spinning": (pauses(0, 0), 20 * scale, (1.0, 3.0)),
        "sleeping": (pauses(1e-3, 3e-3), 2 * scale, (60.0, 120.0)),
        "regular": (pauses(2e-3, 2e-3), 2 * scale, (None, None)),
        "polled": (pauses(1e-3, 3e-3), 2 * scale, (None, None)),
    }
    own_cores = cpus is not None and cpus[0] != cpus[1]
    hop_times: dict[str, list[Times]] = {kind: [] for kind in kinds}
    zmq_times: dict[str, list[Times]] = {kind: [] for kind in kinds}
    for _ in range(NUM_PAIRS if own_cores else 1):
        with two_processes(cpus) as (plane, echo):
            hops = Hops(plane)
            for kind, (pause, num_iterations, _targets) in kinds.items():
                hop_times[kind].append(Times.of(hops.run(pause, num_iterations, kind == "polled")))
                zmq_times[kind].append(Times.of(echo_times(echo, pause, 500 * scale)))
    for kind, (_pause, _num, targets) in kinds.items():
        own, zmq_own = Summary.of(hop_times[kind]), Summary.of(zmq_times[kind])
        if own_cores:
            yield Row(f"hop, {kind}, {where}, p50 in us", own.p50_us, "1 us", targets[0], False, str(own))
            yield Row(f"hop, {kind}, {where}, p99 in us", own.p99_us, "1 us", targets[1], False, str(own))
        limit = 0.6 if own_cores and kind == "sleeping" else None
        ratio = own.p50_us / zmq_own.p50_us
        detail = f"{own}; pyzmq {zmq_own}"
        yield Row(f"hop, {kind}, {where}", ratio, "hop / pyzmq round trip", limit, at_least=False, detail=detail)


def pool_row(cpus: Sequence[int]) -> Row:
    """Runs of the thread pool, one right after the other."""
    threads = ThreadPool(len(cpus), list(cpus))
    allowed = os.sched_getaffinity(0)
    threads.fork_join_ns(1000)
    times = Summary.of([Times.of(threads.fork_join_ns(20000))])
    os.sched_setaffinity(0, allowed)
    measure = f"fork and join of {len(cpus)} pinned threads, p50 in us"
    return Row(measure, times.p50_us, "1 us", 2.0, at_least=False, detail=str(times))


def main() -> None:
    parser = arguments("What a layer's hop to the CPU attention service costs.")
    parser.add_argument("--scale", type=int, default=1, help="how long to measure")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    rows: list[Row] = []
    if len(cpus) > 1:
        rows += hop_rows((cpus[0], cpus[-1]), "own cores", args.scale)
        rows.append(pool_row(cpus))
    rows += hop_rows((cpus[0], cpus[0]), "one core for both", args.scale)
    rows += hop_rows(None, "not pinned", args.scale)
    rows += [service_row(num_sequences, 60 * args.scale) for num_sequences in (8, 32)]
    publish("hop", "Layer hop", "make bench-hop", ABOUT, rows, args.publish)


if __name__ == "__main__":
    main()
