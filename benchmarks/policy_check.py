"""Predicted against measured time of each execution policy, on a device too small for the model.

Device "cpu" plays a GPU whose memory holds a share of the layers, behind an emulated link. Under each policy a stack
serves batches of equal prompts that arrive together while another request decodes, whose tokens tell when the iteration
began that computes the first of them. TTFT is from there to the last prompt's first token, TPOT that of the iterations
after it. One stack, with layers on
either processor, measures the operations; from its tables alone all is predicted, and which policy would be best.

    python benchmarks/policy_check.py [--policies NAME,...] [--batches 1,4,8] [--prompts 16,64,192] [--publish]

With --policies only some are measured, into a file beside those of earlier runs; the table is of all that is there.
"""

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from policy_report import Calibrated, Cell, Kept, rows
from realtime import tables_of
from results import ROOT, arguments, publish

from gpu_svc.activations import Activations
from gpu_svc.limits import Limits
from neoflex import AsyncClient, Delta
from neoflex.supervisor import LocalStack
from planner_svc.estimator import OperationTables
from planner_svc.policy import (
    PolicyEstimator,
    RequestMix,
    ServiceMemory,
    decoder_figures,
    measured_figures,
    measured_machine,
)
from svc_common.config import Config, PlannerConfig, parse
from svc_common.model.read_spec import read_spec
from svc_common.model.spec import ModelSpec
from svc_common.model.store import default_cache_dir, resolve
from svc_common.policy import ExecutionPolicy

_READY_S = 600.0
_DTYPE, _DTYPE_BYTES = "fp32", 4
_KV_BYTES = {"gpu": 128 * 2**20, "host": 384 * 2**20}
"""Room on the GPU's tier for the largest batch whichever layers the CPU computes."""
_OUTPUT_TOKENS = 21
_SEQUENCE_TOKENS = 512
_SETTLED_TOKENS = 4
"""After which TPOT counts: the request that told when the prompts' iteration began has gone by then."""
_WATCH_TOKENS = 400
_MOST_TRIES = 10
_KNEE_TOKENS = 512
"""Of prompts, that an iteration takes at least where there are so many; the scheduler may find more of no use."""
_FITTING = ("partition", "partition of both", "offloading", "CPU-only")
_RESIDENT = "resident"
"""Needs more memory than there is, so it is no choice."""


class Setting:
    """The model on the small device."""

    def __init__(self, args: argparse.Namespace) -> None:
        files = resolve(args.model)
        self.source = str(files.gguf or files.directory)
        self.spec: ModelSpec = read_spec(files)
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
        """For weights, buffers and KV."""
        activations = Activations(self.spec, torch.device("cpu"), torch.float32, torch.float32)
        limits = Limits(PlannerConfig().max_running_sequences, self.batch_tokens + 1, _SEQUENCE_TOKENS)
        self.activation_bytes = activations.num_bytes(limits)

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
            _RESIDENT: (
                {"prefill_policy": "offload", "decode_policy": "offload"},
                ExecutionPolicy(num_layers),
            ),
        }

    def config(self, name: str) -> Config:
        values: dict[str, object] = {
            "model": {"source": self.source},
            "kv": {"prefix_cache": False},
            "planner": {
                "listen": "127.0.0.1:0",
                "mode": "gpu_only",
                "max_batch_tokens": self.batch_tokens + 1,
                "max_sequence_tokens": _SEQUENCE_TOKENS,
                **self.policies[name][0],
            },
            "gpu": {
                "device": "cpu",
                "dtype": _DTYPE,
                "kv_bytes": _KV_BYTES["gpu"],
                **({} if name == _RESIDENT else {"memory_bytes": self.memory_bytes + self.activation_bytes}),
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
        return PolicyEstimator(figures, measured_machine(tables, figures, memory), warm=True)


@contextmanager
def running(config: Config) -> Iterator[LocalStack]:
    run_dir = Path(tempfile.mkdtemp(prefix="nfx-"))
    try:
        with LocalStack(config, run_dir) as stack:
            stack.wait_ready(_READY_S)
            yield stack
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


class Tokens:
    """When each token of a stream comes."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._more = asyncio.Event()

    async def read(self, stream: AsyncIterator[Delta]) -> None:
        async for delta in stream:
            self.times += [time.perf_counter()] * len(delta.token_ids)
            self._more.set()

    async def until(self, num: int) -> None:
        while len(self.times) < num:
            self._more.clear()
            await self._more.wait()


def _ends(times: list[float]) -> tuple[float, float]:
    return min(times), max(times)


async def batch(address: str, mix: RequestMix, vocab_size: int, seed: int) -> tuple[float, float] | None:
    """(TTFT, TPOT) of a batch; None where prompts went into different iterations that had room in one."""
    generator = random.Random(seed)

    def prompt(num_tokens: int) -> list[int]:
        return [generator.randrange(100, vocab_size) for _ in range(num_tokens)]

    prompts = [prompt(mix.prompt_tokens) for _ in range(mix.num_sequences)]
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    watched = Tokens()
    answers = [Tokens() for _ in prompts]
    async with AsyncClient(address) as client:
        stream = client.stream(token_ids=prompt(4), max_tokens=_WATCH_TOKENS, **options)
        watch = asyncio.create_task(watched.read(stream))
        await watched.until(3)
        async with asyncio.TaskGroup() as group:
            for tokens, answer in zip(prompts, answers, strict=True):
                stream = client.stream(token_ids=tokens, max_tokens=mix.output_tokens, **options)
                group.create_task(answer.read(stream))
            for answer in answers:
                await answer.until(1)
            await watched.until(len(watched.times) + 1)
            watch.cancel()
    first_s = [answer.times[0] for answer in answers]
    # Of the watched request's tokens those that came with the first and the last of them; the one before came as the
    # first one's iteration began.
    first, last = (min(range(1, len(watched.times)), key=lambda i: abs(watched.times[i] - s)) for s in _ends(first_s))
    if last - first >= -(-mix.prompt_tokens * mix.num_sequences // _KNEE_TOKENS):
        return None
    begin_s = watched.times[first - 1]
    num_settled = mix.output_tokens - 1 - _SETTLED_TOKENS
    first_settled_s, last_s = (max(answer.times[at] for answer in answers) for at in (_SETTLED_TOKENS, -1))
    return max(first_s) - begin_s, (last_s - first_settled_s) / num_settled


def measured(address: str, name: str, mixes: list[RequestMix], vocab_size: int, rounds: int) -> Iterator[Cell]:
    """Of each mix a first run, which is for calibration, and others."""
    for mix in mixes:
        runs: list[tuple[float, float]] = []
        for seed in range(_MOST_TRIES):
            if (run := asyncio.run(batch(address, mix, vocab_size, seed))) is not None:
                runs.append(run)
            if len(runs) > rounds:
                break
        else:
            raise SystemExit(f"{name}: {mix} hardly ever arrived within one iteration")
        yield Cell(name, mix, tuple(runs))


@contextmanager
def measuring_afresh() -> Iterator[None]:
    """With the user's models and packed weights, and no tables of an earlier start."""
    real = default_cache_dir()
    with tempfile.TemporaryDirectory(prefix="nfx-") as directory:
        cache = Path(directory) / "neoflex"
        cache.mkdir()
        for name in ("models", "layers", "tokenizers"):
            (real / name).mkdir(parents=True, exist_ok=True)
            (cache / name).symlink_to(real / name)
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = directory
        try:
            yield
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


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
    parser.add_argument("--policies", help="measure these only; those of earlier runs stay in the table")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "policy_check.json", help="where all cells lie")
    args = parser.parse_args()
    setting = Setting(args)
    names = list(setting.policies) if args.policies is None else args.policies.split(",")
    if unknown := [name for name in names if name not in setting.policies]:
        parser.error(f"--policies: {unknown[0]!r} is none of {', '.join(setting.policies)}")
    shapes = [(size, prompt) for size in args.batches for prompt in args.prompts]
    mixes = [RequestMix(prompt, _OUTPUT_TOKENS, size, setting.batch_tokens) for size, prompt in shapes]
    facts = {name: value for name, value in vars(args).items() if name not in ("policies", "keep", "publish")}
    kept = Kept(args.keep, facts)
    with measuring_afresh():
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            with running(setting.config(name)) as stack:
                found = list(measured(stack.address, name, mixes, setting.spec.vocab_size, args.rounds))
                # One partition measures the operations of both processors, for all.
                kept.add(name, found, tables_of(stack) if name == _FITTING[0] else None)
    missing = set(setting.policies) - {cell.policy for cell in kept.cells}
    if kept.tables is None or missing:
        raise SystemExit(f"kept in {args.keep}; still to be measured: {', '.join(sorted(missing))}")
    about = (
        f"{args.model} in {_DTYPE} on device cpu with room for {setting.num_resident} of {setting.spec.num_layers} "
        f"layers, link {args.link / 1e9:g} GB/s, {_OUTPUT_TOKENS} tokens out, medians of {args.rounds} batches. "
        "TTFT: from the start of the iteration that computes the first prompts, in most cells all of them, to the last "
        "prompt's first token; TPOT: iterations after it. *resident* has room for all layers, and is no choice. "
        "Calibrated: times a factor for each policy and phase, the median over the first runs of all its cells, which "
        "count for nothing else."
    )
    policies = {name: policy for name, (_, policy) in setting.policies.items()}
    table = list(rows(kept.cells, Calibrated(kept.cells, policies, setting.estimator(kept.tables)), _FITTING))
    publish("policy_check", "Policies, predicted and measured", "make bench-policy-check", about, table, args.publish)


if __name__ == "__main__":
    main()
