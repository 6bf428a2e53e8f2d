"""Predicted against measured time of each execution policy, on a device too small for the model.

Device "cpu" plays a GPU whose memory holds a share of the layers, behind an emulated link. Under each policy a stack
serves batches of equal prompts that arrive at once: TTFT until the last prompt has its first token, TPOT from there to
the end. One stack, with layers on either processor, measures the operations; from its tables alone all is predicted,
and which policy would be best.

    python benchmarks/policy_check.py [--batches 1,4,8] [--prompts 16,64,192] [--rounds 3] [--publish]
"""

import argparse
import asyncio
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format
from realtime import tables_of
from results import Row, arguments, publish

from neoflex import AsyncClient
from neoflex.supervisor import LocalStack
from neoflex.v1 import executor_pb2
from planner_svc.estimator import OperationTables
from planner_svc.policy import (
    PolicyEstimator,
    RequestMix,
    ServiceMemory,
    decoder_figures,
    measured_figures,
    measured_machine,
)
from planner_svc.wire import tables_from_message
from svc_common.config import Config, parse
from svc_common.model.read_spec import read_spec
from svc_common.model.spec import ModelSpec
from svc_common.model.store import resolve
from svc_common.policy import ExecutionPolicy

_READY_S = 600.0
_DTYPE, _DTYPE_BYTES = "fp32", 4
_KV_BYTES = {"gpu": 64 * 2**20, "host": 128 * 2**20}
_ERROR, _NEAR_BEST, _SHARE_NEAR = 0.20, 1.10, 0.90
_OUTPUT_TOKENS = 17
_OF_ERRORS = "|predicted / measured - 1|"


@dataclass(frozen=True)
class Cell:
    """One policy, batch and prompt length."""

    policy: str
    mix: RequestMix
    ttft_s: float
    tpot_s: float
    first: tuple[float, float]
    """Both, of the run before those that count."""

    @property
    def total_s(self) -> float:
        return _total_s(self.mix, (self.ttft_s, self.tpot_s))


def _total_s(mix: RequestMix, times: tuple[float, float]) -> float:
    """Of TTFT and TPOT."""
    return times[0] + mix.num_decode_iterations * times[1]


class Setting:
    """The model on the small device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.source: str = args.model
        self.spec: ModelSpec = read_spec(resolve(args.model))
        self.link_bytes_per_s: int = args.link
        self.layer_bytes = max(self.spec.layer_bytes(index, _DTYPE_BYTES) for index in range(self.spec.num_layers))
        layers = sum(self.spec.layer_bytes(index, _DTYPE_BYTES) for index in range(self.spec.num_layers))
        self.other_bytes = self.spec.weight_bytes(_DTYPE_BYTES) - layers
        self.batch_tokens = max(args.batches) * max(args.prompts)
        """All prompts of a batch go in one iteration."""
        self.num_resident = round(args.resident * self.spec.num_layers)
        # Two buffers, and a little for norms.
        held_bytes = (self.num_resident + 2) * self.layer_bytes + self.other_bytes
        self.memory_bytes = round(1.01 * held_bytes) + _KV_BYTES["gpu"]

    @property
    def policies(self) -> Mapping[str, tuple[dict[str, object], ExecutionPolicy]]:
        """By name: the planner's keys, and what the executor makes of them."""
        num_layers, resident = self.spec.num_layers, self.num_resident
        partition = {"decode_policy": "partition", "cpu_layers": num_layers - resident}
        return {
            "partition": (
                {"prefill_policy": "offload", **partition},
                ExecutionPolicy(resident, 0, num_layers - resident),
            ),
            "partition of both": (
                {"prefill_policy": "partition", **partition},
                ExecutionPolicy(resident, num_layers - resident, num_layers - resident),
            ),
            "offloading": (
                {"prefill_policy": "offload", "decode_policy": "offload"},
                ExecutionPolicy(resident),
            ),
            "CPU-only": (
                {"prefill_policy": "cpu_only", "decode_policy": "cpu_only"},
                ExecutionPolicy(0, num_layers, num_layers),
            ),
        }

    def config(self, planner: dict[str, object]) -> Config:
        values: dict[str, object] = {
            "model": {"source": self.source},
            "planner": {
                "listen": "127.0.0.1:0",
                "mode": "gpu_only",
                "max_batch_tokens": self.batch_tokens,
                "max_sequence_tokens": 512,
                **planner,
            },
            "gpu": {
                "device": "cpu",
                "dtype": _DTYPE,
                "kv_bytes": _KV_BYTES["gpu"],
                "memory_bytes": self.memory_bytes,
                "link_bytes_per_s": self.link_bytes_per_s,
            },
            "cpu_attn": {"kv_bytes": _KV_BYTES["host"]},
        }
        return parse(values, "benchmark")

    def estimator(self, tables: OperationTables) -> PolicyEstimator:
        memory = ServiceMemory(
            gpu_bytes=self.memory_bytes,
            gpu_kv_bytes=_KV_BYTES["gpu"],
            host_bytes=2**40,
            host_kv_bytes=_KV_BYTES["host"],
            layer_bytes=self.layer_bytes,
            other_bytes=self.other_bytes,
        )
        figures = measured_figures(decoder_figures(self.spec, _DTYPE_BYTES, _DTYPE_BYTES), memory)
        return PolicyEstimator(figures, measured_machine(tables, figures, memory))


@contextmanager
def running(config: Config) -> Iterator[LocalStack]:
    run_dir = Path(tempfile.mkdtemp(prefix="nfx-"))
    try:
        with LocalStack(config, run_dir) as stack:
            stack.wait_ready(_READY_S)
            yield stack
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


async def batch(address: str, mix: RequestMix, vocab_size: int, seed: int) -> tuple[float, float]:
    """(TTFT of the last, TPOT from there on) of a batch that arrives at once."""
    generator = random.Random(seed)
    prompts = [
        [generator.randrange(100, vocab_size) for _ in range(mix.prompt_tokens)] for _ in range(mix.num_sequences)
    ]
    firsts: list[float] = []

    async def ask(client: AsyncClient, prompt: list[int]) -> None:
        stream = client.stream(token_ids=prompt, max_tokens=mix.output_tokens, temperature=0.0, ignore_eos=True)
        is_first = True
        async for _ in stream:
            if is_first:
                firsts.append(time.perf_counter())
                is_first = False

    async with AsyncClient(address) as client:
        start_s = time.perf_counter()
        await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        end_s = time.perf_counter()
    return max(firsts) - start_s, (end_s - max(firsts)) / mix.num_decode_iterations


def measured(address: str, name: str, mixes: list[RequestMix], vocab_size: int, rounds: int) -> Iterator[Cell]:
    """Of each mix a first run, which is for calibration, and medians of the others."""
    for mix in mixes:
        first, *runs = (asyncio.run(batch(address, mix, vocab_size, seed)) for seed in range(rounds + 1))
        ttft_s, tpot_s = (statistics.median(times) for times in zip(*runs, strict=True))
        yield Cell(name, mix, ttft_s, tpot_s, first)


class Calibrated:
    """Predictions, and what first runs say they must be multiplied by: a factor for each policy and phase."""

    def __init__(self, cells: list[Cell], setting: Setting, estimator: PolicyEstimator) -> None:
        self.plain: dict[tuple[str, RequestMix], tuple[float, float]] = {}
        """(TTFT, TPOT) of a policy and a mix."""
        for cell in cells:
            found = estimator.predict(setting.policies[cell.policy][1], cell.mix)
            self.plain[cell.policy, cell.mix] = found.ttft_s, found.tpot_s
        self._factors = {name: self._factor(cells, name) for name in setting.policies}

    def _factor(self, cells: list[Cell], name: str) -> tuple[float, float]:
        own = [cell for cell in cells if cell.policy == name]
        ttft, tpot = (
            statistics.median(cell.first[phase] / self.plain[name, cell.mix][phase] for cell in own) for phase in (0, 1)
        )
        return ttft, tpot

    def __call__(self, policy: str, mix: RequestMix) -> tuple[float, float]:
        (ttft_s, tpot_s), (ttft, tpot) = self.plain[policy, mix], self._factors[policy]
        return ttft * ttft_s, tpot * tpot_s


def rows(cells: list[Cell], predicted: Calibrated) -> Iterator[Row]:
    """Of each cell, of all, and of the choice."""
    plain, errors = [], []
    for cell in cells:
        before, after = predicted.plain[cell.policy, cell.mix], predicted(cell.policy, cell.mix)
        real = (cell.ttft_s, cell.tpot_s)
        plain += [abs(time_s / real_s - 1) for time_s, real_s in zip(before, real, strict=True)]
        own = [abs(time_s / real_s - 1) for time_s, real_s in zip(after, real, strict=True)]
        errors += own
        where = f"{cell.policy}, batch {cell.mix.num_sequences}, {cell.mix.prompt_tokens} in"
        detail = (
            f"TTFT {real[0] * 1e3:.0f} ms, predicted {before[0] * 1e3:.0f}, calibrated {after[0] * 1e3:.0f}; "
            f"TPOT {real[1] * 1e3:.1f}, {before[1] * 1e3:.1f}, {after[1] * 1e3:.1f}"
        )
        yield Row(where, statistics.mean(own), _OF_ERRORS, None, False, detail)
    yield Row("all: mean absolute error, from the tables alone", statistics.mean(plain), _OF_ERRORS, None, False)
    yield Row("all: mean absolute error", statistics.mean(errors), _OF_ERRORS, _ERROR, False)
    near = []
    for mix in dict.fromkeys(cell.mix for cell in cells):
        group = [cell for cell in cells if cell.mix == mix]
        chosen = min(group, key=lambda cell: _total_s(mix, predicted(cell.policy, mix)))
        near.append(chosen.total_s <= _NEAR_BEST * min(cell.total_s for cell in group))
    share = statistics.mean(near)
    yield Row("the choice is the best, or within 10 % of it", share, "cells", _SHARE_NEAR, detail=f"{len(near)} cells")


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> None:
    parser = arguments("Predicted against measured time of each execution policy.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batches", default=[1, 4, 8], type=_numbers)
    parser.add_argument("--prompts", default=[16, 64, 192], type=_numbers)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resident", type=float, default=0.4, help="share of the layers that the device holds")
    parser.add_argument("--link", type=int, default=2_000_000_000, help="bytes/s of the emulated link")
    args = parser.parse_args()
    setting = Setting(args)
    shapes = [(size, prompt) for size in args.batches for prompt in args.prompts]
    mixes = [RequestMix(prompt, _OUTPUT_TOKENS, size, setting.batch_tokens) for size, prompt in shapes]
    cells: list[Cell] = []
    tables: OperationTables | None = None
    for name, (planner, _) in setting.policies.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        with running(setting.config(planner)) as stack:
            if tables is None:  # Of the first, a partition.
                document = json_format.ParseDict(tables_of(stack), executor_pb2.OperationTables())
                tables = tables_from_message(document)
            cells += measured(stack.address, name, mixes, setting.spec.vocab_size, args.rounds)
    assert tables is not None
    about = (
        f"{args.model} in {_DTYPE} on device cpu with room for {setting.num_resident} of {setting.spec.num_layers} "
        f"layers, link {args.link / 1e9:g} GB/s, {_OUTPUT_TOKENS} tokens out, medians of {args.rounds} batches. "
        "TTFT until the last prompt's first token, TPOT from there to the end. Calibrated: times a factor for each "
        "policy and phase, the median over the first runs of all its cells, which count for nothing else."
    )
    table = list(rows(cells, Calibrated(cells, setting, setting.estimator(tables))))
    publish("policy_check", "Policies, predicted and measured", "make bench-policy-check", about, table, args.publish)


if __name__ == "__main__":
    main()
