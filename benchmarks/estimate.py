"""Predicted against measured iteration time of the real stack, under a mixed load.

Clients in a closed loop ask for short and long answers to short and long prompts, more KV than the "GPU" cache holds,
so that both tiers and all modes are in use. Every iteration is traced, which costs under a percent; the first ones,
while online calibration learns, are left out.

    python benchmarks/estimate.py [--seconds 40] [--clients 16] [--dtype auto] [--json FILE] [--publish]
"""

import argparse
import asyncio
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from real_stack import running
from results import Row, arguments, publish

from neoflex import AsyncClient
from neoflex.trace.record import record
from svc_common.model.read_spec import read_spec
from svc_common.model.store import resolve
from svc_common.plan import Mode
from svc_common.trace import IterationTrace

_LEARNING = 100
"""Iterations before predictions count."""
_PROMPT_TOKENS = (16, 600)
_ANSWER_TOKENS = (8, 160)
"""Uniform in the logarithm: mostly short, some long."""
_MEDIAN_LIMIT, _P95_LIMIT = 0.05, 0.15
_GPU_SHARE = 0.3
"""Of the KV that all clients need together."""


async def load(address: str, args: argparse.Namespace, until_s: float) -> None:
    """Each client asks anew as soon as it is answered."""
    generator = random.Random(args.seed)
    vocab_size = read_spec(resolve(args.model)).vocab_size

    def draw(bounds: tuple[int, int]) -> int:
        low, high = bounds
        return round(math.exp(generator.uniform(math.log(low), math.log(high))))

    async def ask(client: AsyncClient) -> None:
        while asyncio.get_running_loop().time() < end_s:
            prompt = [generator.randrange(100, vocab_size) for _ in range(draw(_PROMPT_TOKENS))]
            stream = client.stream(token_ids=prompt, max_tokens=draw(_ANSWER_TOKENS), ignore_eos=True)
            async for _ in stream:
                if asyncio.get_running_loop().time() >= end_s:
                    break

    async with AsyncClient(address) as client:
        end_s = asyncio.get_running_loop().time() + until_s
        await asyncio.gather(*(ask(client) for _ in range(args.clients)))


def traced(args: argparse.Namespace, mode: str) -> list[IterationTrace]:
    """All iterations of a run."""
    longest_tokens = _PROMPT_TOKENS[1] + _ANSWER_TOKENS[1] + 16
    stack_of = running(
        mode,
        args.clients * longest_tokens,
        _GPU_SHARE,
        longest_tokens,
        "always",
        model=args.model,
        device=args.device,
        dtype=args.dtype,
    )
    with stack_of as stack, ThreadPoolExecutor(1) as pool:
        recording = pool.submit(record, stack.address, args.seconds)
        asyncio.run(load(stack.address, args, args.seconds))
        return recording.result()


def rows(mode: str, traces: Sequence[IterationTrace]) -> Iterator[Row]:
    """In all, and by mode where there are enough to tell."""
    counted = [trace for trace in traces if trace.iteration > _LEARNING and trace.predicted_ns]
    groups = {"all": counted} | {each.value: [t for t in counted if t.mode is each] for each in Mode}
    for name, group in groups.items():
        if len(group) < _LEARNING or (name != "all" and len(group) == len(counted)):
            continue
        errors = sorted(abs(trace.predicted_ns / trace.duration_ns - 1) for trace in group)
        median, p95 = statistics.median(errors), errors[int(0.95 * len(errors))]
        bias = sum(trace.predicted_ns for trace in group) / sum(trace.duration_ns for trace in group) - 1
        middle_ms = statistics.median(trace.duration_ns for trace in group) / 1e6
        detail = f"{len(group)} iterations, median {middle_ms:.1f} ms, predictions {bias:+.1%} in all"
        where = f"planner.mode {mode}, {name}"
        yield Row(f"{where}: median error", median, "|predicted / measured - 1|", _MEDIAN_LIMIT, False, detail)
        yield Row(f"{where}: p95 error", p95, "|predicted / measured - 1|", _P95_LIMIT, False)


def main() -> None:
    parser = arguments("Predicted against measured iteration time of the real stack.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["auto", "gpu_only"])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="every iteration's figures")
    args = parser.parse_args()
    results = {mode: traced(args, mode) for mode in args.modes}
    if args.json:
        args.json.write_text(json.dumps({mode: [_figures(t) for t in traces] for mode, traces in results.items()}))
    about = (
        f"{args.clients} clients in a closed loop for {args.seconds:g} s, prompts of {_PROMPT_TOKENS[0]} to "
        f"{_PROMPT_TOKENS[1]} tokens, answers of {_ANSWER_TOKENS[0]} to {_ANSWER_TOKENS[1]}, "
        f"{_GPU_SHARE:.0%} of the KV on the GPU; without the first {_LEARNING} iterations."
    )
    table = [row for mode, traces in results.items() for row in rows(mode, traces)]
    publish("estimate", "Predicted against measured", "make bench-estimate", about, table, args.publish)


def _figures(trace: IterationTrace) -> dict[str, object]:
    kinds: dict[str, int] = {}
    for event in trace.events(trace.gpu, *trace.cpu):
        kinds[event.kind.name] = kinds.get(event.kind.name, 0) + event.duration_ns
    return {
        "iteration": trace.iteration,
        "mode": trace.mode.value,
        "predicted_ns": trace.predicted_ns,
        "duration_ns": trace.duration_ns,
        "sub_batches": [
            (batch.prefill_tokens, batch.gpu_decodes, batch.cpu_decodes, batch.cpu_context_tokens)
            for batch in trace.sub_batches
        ],
        "kinds_ns": kinds,
    }


if __name__ == "__main__":
    main()
