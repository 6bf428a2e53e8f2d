"""The same requests through the real stack, in real time, and through the simulator with the tables measured here.

Requests arrive as a Poisson process at shares of the rate that the simulator says a burst is served at. The simulator
has the serving scheduler, the order of events, the operations' tables from the start of the stack, and what the running
planner has learned of them from other requests, in a warm-up and in the runs before: its factor for each part of an
iteration, as `neoflex status` shows them, on average. That is needed because the tables are measured with the machine
to themselves, while planner and client take turns with the executor on the processor's cores, and because a shared
machine's speed changes from minute to minute; each row also says what the tables alone give. Nobody tells the simulator
what the requests that count took. A second pass replaces the real executor by one that sleeps for what the tables say:
what then differs is what the simulator leaves out, not what the tables got wrong.

    python benchmarks/realtime.py [--shares 0.5,0.9] [--requests 40] [--rounds 2] [--mode auto] [--publish]
"""

import argparse
import asyncio
import copy
import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from google.protobuf import json_format
from paced import PacedExecutor
from paced import running as paced
from real_stack import running
from results import Row, arguments, publish

from gpu_svc.kv_cache import KvShape
from gpu_svc.wire import tables_from_json
from neoflex import AsyncClient
from neoflex.supervisor import LocalStack
from neoflex.v1 import executor_pb2
from planner_svc.estimator import Factors, TableEstimator
from planner_svc.scheduler import Capacity, ModePolicy, Scheduler, Targets
from planner_svc.simulator.classes import one_class
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.metrics import Metrics
from planner_svc.simulator.metrics import measure as measure_simulated
from planner_svc.simulator.simulation import Simulation
from planner_svc.wire import tables_from_message
from svc_common.model.read_spec import read_spec
from svc_common.model.store import resolve
from svc_common.workloads.workload import Arrival, at_rate

_PROMPT_TOKENS = (16, 256)
_ANSWER_TOKENS = (16, 64)
_GPU_SHARE = 0.5
_NO_TARGETS = Targets(1e9, 1e9)
_LATENCY_LIMIT, _THROUGHPUT_LIMIT = 0.15, 0.10
_WARM_UP = 16
"""Requests before those that count: some 300 iterations, from which the planner learns."""
_SAMPLE_EVERY_S = 0.25
_WARM_UP_SHARE = 0.7
"""Of capacity, by the tables alone: the rate at which they arrive."""


@dataclass(frozen=True)
class Outcome:
    """Of one run, as in Metrics."""

    ttft_p50: float
    server_ttft_p50: float
    """By the planner's clock, from the call to the token on its way out."""
    tpot_p50: float
    thr_makespan: float


def workload(num_requests: int, seed: int) -> list[Arrival]:
    """At one request a second on average."""
    generator, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        prompt, answer = (generator.randint(*bounds) for bounds in (_PROMPT_TOKENS, _ANSWER_TOKENS))
        arrivals.append(Arrival(at_s, prompt, answer))
        at_s += generator.expovariate(1.0)
    return arrivals


# --- the simulator


def tables_of(stack: LocalStack) -> dict[str, Any]:
    """Those that its executor uses, as JSON: their file is named in its log."""
    found = re.findall(r"operations (?:are kept in|were measured .* ago, see) (\S+)", _log(stack))
    if not found:
        raise SystemExit("gpu_svc names no file of measured operations")
    tables = json.loads(Path(found[-1]).read_text())["tables"]
    assert isinstance(tables, dict)
    return tables


def _log(stack: LocalStack) -> str:
    return stack.log_paths["gpu_svc"].read_text()


class Simulator:
    """The stack as the simulator sees it."""

    def __init__(self, stack: LocalStack, tables: dict[str, Any], mode: ModePolicy, num_layers: int) -> None:
        info, planner = stack.server_info(), stack.config.planner
        assert planner.max_sequence_tokens is not None
        self.mode = mode
        self.tables = tables_from_message(json_format.ParseDict(tables, executor_pb2.OperationTables()))
        self._num_layers = num_layers
        self._factors = Factors()
        self.capacity = Capacity(
            gpu_blocks=info.gpu_blocks,
            host_pools=(info.host_blocks,),
            block_tokens=info.block_tokens,
            max_sequences=planner.max_running_sequences,
            max_batch_tokens=planner.max_batch_tokens,
            max_sequence_tokens=planner.max_sequence_tokens,
            block_bytes=info.block_bytes,
        )

    def alone(self) -> "Simulator":
        """Tables alone, with all KV on the GPU."""
        other = copy.copy(self)
        capacity = self.capacity
        other.capacity = replace(capacity, gpu_blocks=capacity.gpu_blocks + capacity.host_blocks, host_pools=())
        other.mode = "gpu_only"
        other._factors = Factors()
        return other

    def calibrated(self, factors: Factors) -> "Simulator":
        """The same with each part of an iteration's cost multiplied. Its scheduler is not told and learns it again."""
        other = copy.copy(self)
        other._factors = factors
        return other

    def estimator(self) -> TableEstimator:
        """As the tables are."""
        return TableEstimator(self.tables, self._num_layers)

    def executor(self) -> SimulatedExecutor:
        truth = self.estimator().calibrated(self._factors)
        return SimulatedExecutor(truth, self.capacity.block_bytes // self.capacity.block_tokens)

    def run(self, arrivals: Sequence[Arrival], rate: float) -> Metrics:
        """`rate` 0: all at once."""
        executor = self.executor()
        scheduler = Scheduler(self.capacity, self.estimator(), self.mode, len(arrivals))
        requests = Simulation(scheduler, executor).run(at_rate(arrivals, rate), one_class(None))
        return measure_simulated(requests, _NO_TARGETS, executor.worked)


# --- the real stack


class Learned:
    """What a running planner believes of the executor: the mean over what it said while it served.

    At a moment it is what about the last ten iterations taught, right for the next one; a round has hundreds.
    """

    def __init__(self) -> None:
        self._samples: list[Factors] = []

    async def watch(self, client: AsyncClient) -> None:
        """To be cancelled."""
        while True:
            await asyncio.sleep(_SAMPLE_EVERY_S)
            if (factors := (await client.server_info()).calibration) is not None:
                self._samples.append(Factors(**asdict(factors)))

    def factors(self) -> Factors:
        """So far; those of the tables where nobody was watched. Of further pools the check has none."""
        learned = Factors()
        for name in asdict(learned).keys() - {"further_pools"} if self._samples else ():
            setattr(learned, name, statistics.fmean(getattr(sample, name) for sample in self._samples))
        print(f"learned in {len(self._samples)} samples: {learned}")
        return learned


async def serve(
    address: str, arrivals: Sequence[Arrival], vocab_size: int, salt: str, learned: Learned | None = None
) -> Outcome:
    """Each request is sent when it arrives, whatever became of those before.

    `salt`: of this run, so that it finds nothing of another's in the prefix cache, which the simulator has not.
    """
    generator = random.Random(0)
    prompts = [[generator.randrange(100, vocab_size) for _ in range(item.prompt_tokens)] for item in arrivals]
    ttfts: list[float] = []
    server_ttfts: list[float] = []
    tpots: list[float] = []
    ends: list[float] = []

    async def one(client: AsyncClient, arrival: Arrival, prompt: list[int]) -> None:
        due_s = start_s + arrival.at_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        first_s = last_s = 0.0
        stream = client.stream(
            token_ids=prompt,
            max_tokens=arrival.output_tokens,
            ignore_eos=True,
            temperature=1.0,
            seed=0,
            cache_salt=salt,
        )
        async for delta in stream:
            if delta.token_ids:
                last_s = time.perf_counter()
                first_s = first_s or last_s
        assert stream.usage is not None
        assert stream.usage.cached_tokens == 0
        ttfts.append(first_s - due_s)
        server_ttfts.append(stream.usage.time_to_first_token_s)
        tpots.append((last_s - first_s) / (arrival.output_tokens - 1))
        ends.append(last_s)

    async with AsyncClient(address) as client:
        watching = asyncio.create_task(learned.watch(client)) if learned else None
        start_s = time.perf_counter()
        await asyncio.gather(*(one(client, *both) for both in zip(arrivals, prompts, strict=True)))
        if watching:
            watching.cancel()
    duration_s = max(ends) - start_s
    medians = [statistics.median(values) for values in (ttfts, server_ttfts, tpots)]
    return Outcome(medians[0], medians[1], medians[2], len(arrivals) / duration_s)


# --- side by side


@dataclass(frozen=True)
class Round:
    """The same requests in reality and on paper."""

    real: Outcome
    simulated: Metrics
    told: Metrics
    """By the tables alone."""

    def ratio(self, name: str) -> float:
        """Real over simulated, of one of Outcome's figures."""
        return float(getattr(self.real, name) / getattr(self.simulated, name))


def rows(what: str, rate: float, rounds: Sequence[Round]) -> Iterator[Row]:
    """Medians over the rounds."""
    for name, quantity, unit, factor, limit in (
        ("ttft_p50", "TTFT p50", "ms", 1e3, _LATENCY_LIMIT),
        ("tpot_p50", "TPOT p50", "ms", 1e3, _LATENCY_LIMIT),
        ("thr_makespan", "throughput", "req/s", 1.0, _THROUGHPUT_LIMIT),
    ):
        ratio = statistics.median(each.ratio(name) for each in rounds)
        real, simulated, told = (
            factor * statistics.median(getattr(getattr(each, side), name) for each in rounds)
            for side in ("real", "simulated", "told")
        )
        detail = f"real {real:.3g} {unit}, simulated {simulated:.3g}, ratio {ratio:.3f}"
        if name == "ttft_p50":
            detail += f"; by the planner's clock {statistics.median(e.real.server_ttft_p50 for e in rounds) * 1e3:.3g}"
        if told != simulated:
            detail += f"; by the tables alone {told:.3g}"
        yield Row(
            f"{what}, {rate:.2f} req/s: {quantity}", abs(ratio - 1), "|real / simulated - 1|", limit, False, detail
        )


def compare(
    address: str,
    vocab_size: int,
    loads: Sequence[Sequence[Arrival]],
    shares: Sequence[float],
    tables: Simulator,
    learned: Learned | None,
) -> Iterator[tuple[float, float, list[Round]]]:
    """Share, rate and rounds. `loads`: of each round, at one request a second; in a round the shares take turns.

    `learned`: all that the simulator is told beside the tables, as far as it goes when a run begins.
    """
    rates = [share * tables.run(loads[0], 0.0).thr_makespan for share in shares]
    rounds: list[list[Round]] = [[] for _ in rates]
    for number, load in enumerate(loads):
        for rate, of_rate in zip(rates, rounds, strict=True):
            simulator = tables.calibrated(learned.factors()) if learned else tables
            arrivals, salt = at_rate(load, rate), f"{number} at {rate}"
            real = asyncio.run(serve(address, arrivals, vocab_size, salt, learned))
            of_rate.append(Round(real, simulator.run(load, rate), tables.run(load, rate)))
    return zip(shares, rates, rounds, strict=True)


def measure(args: argparse.Namespace) -> list[Row]:
    spec = read_spec(resolve(args.model))
    loads = [workload(args.requests, args.seed + number) for number in range(args.rounds)]
    longest_tokens = _PROMPT_TOKENS[1] + _ANSWER_TOKENS[1] + 16
    num_kv_tokens = args.requests * longest_tokens // 2
    table: list[Row] = []

    def at_shares(what: str, address: str, tables: Simulator, learned: Learned | None) -> None:
        for share, rate, rounds in compare(address, spec.vocab_size, loads, args.shares, tables, learned):
            table.extend(rows(f"{what}, {share:.0%} of capacity", rate, rounds))

    with running(
        args.mode, num_kv_tokens, _GPU_SHARE, longest_tokens, "auto", model=args.model, dtype=args.dtype
    ) as stack:
        tables = tables_of(stack)
        told = Simulator(stack, tables, args.mode, spec.num_layers)
        warm_up = workload(_WARM_UP, args.seed + args.rounds)
        warm_up_rate = _WARM_UP_SHARE * told.run(warm_up, 0.0).thr_makespan
        learned = Learned()
        asyncio.run(serve(stack.address, at_rate(warm_up, warm_up_rate), spec.vocab_size, "warm-up", learned))
        at_shares("real stack", stack.address, told, learned)
        counters = stack.server_info().counters
        config = stack.config
    print(f"iterations: {counters.gpu_only_iterations} on the GPU alone, {counters.asymmetric_iterations} asymmetric")
    alone = told.alone()
    shape = KvShape.of(spec, alone.capacity.block_tokens, torch.bfloat16)
    executor = PacedExecutor(alone.executor(), tables_from_json(tables), spec, shape, alone.capacity.gpu_blocks)
    with paced(config, executor) as address:
        at_shares("executor that sleeps", address, alone, None)
    return table


def main() -> None:
    parser = arguments("The real stack in real time beside the simulator.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--mode", default="auto", choices=("auto", "gpu_only", "asymmetric"))
    parser.add_argument("--shares", type=lambda text: [float(n) for n in text.split(",")], default=[0.5, 0.9])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    table = measure(args)
    about = (
        f"{args.requests} requests of {_PROMPT_TOKENS[0]} to {_PROMPT_TOKENS[1]} tokens with answers of "
        f"{_ANSWER_TOKENS[0]} to {_ANSWER_TOKENS[1]}, Poisson arrivals, mode {args.mode}; shares of the rate at which "
        f"the simulator serves them as a burst by the tables alone. The simulator runs on the tables of the start, "
        f"multiplied by what the running planner has learned of other requests, on average until a run begins: at "
        f"first in a warm-up of {_WARM_UP}. Medians over {args.rounds} rounds, each with requests of its own."
    )
    publish("realtime", "Simulator against real time", "make bench-realtime", about, table, args.publish)


if __name__ == "__main__":
    main()
