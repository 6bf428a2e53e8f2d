"""Tokens per second and latency of the real stack, with transformers' `generate` beside it in the same run.

Systems take turns on the same prompts, round after round, so that a noisy machine is noisy for all:

    transformers  one static batch of all prompts, fp32, all cores
    gpu_only      all KV in the "GPU" cache, no CPU attention service, all cores to gpu_svc
    small_gpu     the same with a tenth of the KV: what does not fit waits; only where a tenth holds a request
    asymmetric    a tenth of the KV in the "GPU" cache, the rest on the host; one core each to gpu_svc and cpu_attn_svc

gpu_only runs once in each type of `--dtypes`, the other stacks in the first; transformers computes in fp32.

    python benchmarks/serve.py [--concurrency 1,8,32] [--rounds 3] [--dtypes fp32,auto] [--json FILE] [--publish]
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from results import arguments, machine_name, publish
from serve_report import Round, System, about, report, rows
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteriaList

from neoflex import AsyncClient
from neoflex.supervisor import LocalStack
from svc_common.config import parse
from svc_common.model.read_spec import read_spec
from svc_common.model.store import ModelFiles, resolve


@dataclass(frozen=True)
class Placement:
    """How a stack splits the KV that all requests need together."""

    mode: str
    gpu_share: float
    host_share: float


STACKS = {
    "gpu_only": Placement("gpu_only", 1.0, 0.0),
    "small_gpu": Placement("gpu_only", 0.1, 0.0),
    "asymmetric": Placement("asymmetric", 0.1, 1.2),
}


class Transformers:
    """`generate` on one batch: the first token marks the end of the prefill."""

    def __init__(self, files: ModelFiles) -> None:
        gguf = {"gguf_file": files.gguf.name} if files.gguf else {}
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            files.directory, dtype=torch.float32, **gguf
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], num_tokens: int) -> Round:
        times: list[float] = []

        def note(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        batch = torch.tensor(prompts)
        start = time.perf_counter()
        # Called once per token, it serves as a clock.
        self.model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note]),
        )
        total = time.perf_counter() - start
        ttft = times[0] - start
        tpot = (times[-1] - times[0]) / (num_tokens - 1)
        return Round(len(prompts) * num_tokens / total, (ttft,) * len(prompts), (tpot,) * len(prompts))


@contextmanager
def running(placement: Placement, model: str, kv_bytes: int, dtype: str) -> Iterator[LocalStack]:
    """A running stack for requests that need `kv_bytes` of KV."""
    run_dir = Path(tempfile.mkdtemp(prefix="nfx-"))
    config = parse(
        {
            "model": {"source": model},
            "planner": {"listen": "127.0.0.1:0", "mode": placement.mode},
            "gpu": {
                "device": "cpu",
                "dtype": dtype,
                "profile": "always",
                "kv_bytes": int(placement.gpu_share * kv_bytes),
            },
            "cpu_attn": {"kv_bytes": int(placement.host_share * kv_bytes)},
        },
        "benchmark",
    )
    local = LocalStack(config, run_dir)
    local.start()
    try:
        local.wait_ready(120)
        yield local
    finally:
        local.stop()


async def drive(local: LocalStack, prompts: list[list[int]], num_tokens: int) -> Round:
    """All prompts at once; each reads its own stream."""
    ttfts, tpots = [], []

    async def one(client: AsyncClient, prompt: list[int]) -> None:
        start = time.perf_counter()
        first = last = 0.0
        async for delta in client.stream(token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True):
            if delta.token_ids:
                last = time.perf_counter()
                first = first or last
        ttfts.append(first - start)
        tpots.append((last - first) / (num_tokens - 1))

    async with AsyncClient(local.address) as client:
        before = (await client.server_info()).counters
        start = time.perf_counter()
        await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        total = time.perf_counter() - start
        after = (await client.server_info()).counters
    done = after.since(before)
    with_cpu = done.offloading_iterations
    return Round(
        len(prompts) * num_tokens / total,
        tuple(ttfts),
        tuple(tpots),
        done.executor_busy_ns / 1e9 / total,
        with_cpu / max(1, with_cpu + done.gpu_only_iterations),
    )


def systems(dtypes: list[str], concurrency: int) -> list[System]:
    """What takes turns with transformers."""
    # Less than ten requests: a tenth of their KV would not hold one.
    names = [name for name in STACKS if STACKS[name].gpu_share + STACKS[name].host_share >= 1 or concurrency > 10]
    first = [System(name, dtypes[0]) for name in names]
    return first + [System("gpu_only", dtype) for dtype in dtypes[1:]]


def measure(args: argparse.Namespace) -> dict[int, dict[str, list[Round]]]:
    files = resolve(args.model)
    spec = read_spec(files)
    transformers = Transformers(files)
    generator = torch.Generator().manual_seed(0)

    def token_bytes(dtype: str) -> int:
        """KV of a token; "auto" may choose the narrow type, and gets room for the wide one."""
        return spec.kv_bytes_per_token(2 if dtype in ("bf16", "fp16") else 4)

    results: dict[int, dict[str, list[Round]]] = {}
    for concurrency in args.concurrency:
        prompts = torch.randint(100, spec.vocab_size, (concurrency, args.prompt_tokens), generator=generator).tolist()
        num_kv_tokens = concurrency * (args.prompt_tokens + args.new_tokens + 16)
        wanted = systems(args.dtypes, concurrency)
        rounds: dict[str, list[Round]] = {name: [] for name in ("transformers", *map(str, wanted))}
        with ExitStack() as running_stacks:
            stacks = {
                str(system): running_stacks.enter_context(
                    running(STACKS[system.stack], args.model, num_kv_tokens * token_bytes(system.dtype), system.dtype)
                )
                for system in wanted
            }
            for stack in stacks.values():  # warm up
                asyncio.run(drive(stack, [prompt[:8] for prompt in prompts], 4))
            for _ in range(args.rounds):
                rounds["transformers"].append(transformers.run(prompts, args.new_tokens))
                for name, stack in stacks.items():
                    rounds[name].append(asyncio.run(drive(stack, prompts, args.new_tokens)))
        results[concurrency] = rounds
    return results


def main() -> None:
    parser = arguments("Throughput and latency beside transformers, in one run.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["fp32", "auto"], help="of the stacks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = measure(args)
    summaries = report(results, args)
    if args.json:
        raw = {str(n): {s: [asdict(r) for r in rs] for s, rs in rounds.items()} for n, rounds in results.items()}
        args.json.write_text(
            json.dumps(
                {
                    "machine": machine_name(),
                    "summary": {key: asdict(value) for key, value in summaries.items()},
                    "rounds": raw,
                },
                indent=1,
            )
        )
    text = f"{about(args)}; medians of {args.rounds} rounds in which the systems take turns. Real services, device cpu."
    publish("serve", "Serving beside transformers", "make bench-serve", text, rows(summaries, args), args.publish)


if __name__ == "__main__":
    main()
