"""What sampling and structured output cost of an iteration: 32 decodes of the default model, in one process.

Kinds of requests take turns, a few iterations each, so that a busy machine disturbs all alike; the first of a turn
does not count, as the masks that it finds were worked out beside another kind. Of each kind the time from logits to
tokens is measured, waits for the grammars' thread among it, and the whole iteration: what masks that are worked out
meanwhile take from the layers shows there.

    python benchmarks/sampling.py [--sequences 32] [--turns 12] [--dtype auto] [--publish]
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from results import Row, arguments, publish

from gpu_svc import epoch
from gpu_svc.__main__ import make_executor
from gpu_svc.executor import Executor
from gpu_svc.limits import Limits
from gpu_svc.sampling_table import SamplingTable
from planner_svc.constraints import Constraint, grammar_of
from svc_common.config import parse
from svc_common.plan import IterationPlan, Mode, NewSequence, PrefillChunk, Sampling, SubBatch, Tier

PROMPT_TOKENS = 64
BLOCK_TOKENS = 16
WARM_UP = 1
"""Turns before those that count."""
TURN = 6
"""Iterations of one kind on end."""
TARGET = 0.05
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 200},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,12}$"}},
        "price": {"type": "number", "minimum": 0},
    },
    "required": ["name", "tags", "price"],
    "additionalProperties": False,
}
"""An answer of it is longer than the benchmark."""
PENALTIES: dict[str, float] = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1}


def kinds() -> dict[str, Sampling]:
    """The first is what the others are compared with."""
    schema = grammar_of(Constraint("json_schema", json.dumps(SCHEMA)))
    return {
        "greedy": Sampling(),
        "temperature 1": Sampling(temperature=1.0),
        "top-p 0.9": Sampling(temperature=1.0, top_p=0.9),
        "penalties": Sampling(temperature=1.0, **PENALTIES),  # type: ignore[arg-type]
        "JSON schema": Sampling(temperature=1.0, grammar=schema),
        "all of it": Sampling(temperature=1.0, top_p=0.9, grammar=schema, **PENALTIES),  # type: ignore[arg-type]
    }


@dataclass
class Kind:
    """Requests of one kind, running, and what was measured of them."""

    ids: tuple[int, ...]
    iteration_s: list[float] = field(default_factory=list)
    sampling_s: list[float] = field(default_factory=list)


class Watch:
    """Adds up the time spent in what it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - start
            return result

        return timed


_epoch_module: Any = epoch  # So that a function of it may be replaced.


@contextmanager
def watched() -> Iterator[Watch]:
    """All that an epoch does between logits and tokens."""
    watch, module = Watch(), _epoch_module
    original = module.sample
    methods = {name: getattr(SamplingTable, name) for name in ("rows", "changes", "failures", "take_tokens")}
    module.sample = watch.over(original)
    for name, method in methods.items():
        setattr(SamplingTable, name, watch.over(method))
    try:
        yield watch
    finally:
        module.sample = original
        for name, method in methods.items():
            setattr(SamplingTable, name, method)


def measure(executor: Executor, num_sequences: int, turns: int) -> dict[str, Kind]:
    """Decodes of all kinds by turns, each kind's sequences in a batch of their own."""
    running: dict[str, Kind] = {}
    iteration = 0

    def run(**changes: Any) -> None:
        nonlocal iteration
        iteration += 1
        result = executor.run(IterationPlan(1, iteration, Mode.GPU_ONLY, **changes))
        assert result.error is None, result.error_message

    blocks_each = -(-(PROMPT_TOKENS + (WARM_UP + turns) * TURN + 1) // BLOCK_TOKENS)
    for number, (name, sampling) in enumerate(kinds().items()):
        ids = tuple(range(number * num_sequences, (number + 1) * num_sequences))
        prompt = tuple(range(1000, 1000 + PROMPT_TOKENS))
        new = tuple(
            NewSequence(i, prompt, Tier.GPU, tuple(range(i * blocks_each, (i + 1) * blocks_each)), sampling)
            for i in ids
        )
        run(new_sequences=new, sub_batches=(SubBatch(prefills=tuple(PrefillChunk(i, 0, PROMPT_TOKENS) for i in ids)),))
        running[name] = Kind(ids)
    with watched() as watch:
        for turn, kind, place in product(range(WARM_UP + turns), running.values(), range(TURN)):
            watch.seconds = 0.0
            start = time.perf_counter()
            run(sub_batches=(SubBatch(gpu_decodes=kind.ids),))
            if turn >= WARM_UP and place > 0:
                kind.iteration_s.append(time.perf_counter() - start)
                kind.sampling_s.append(watch.seconds)
    return running


def main() -> None:
    parser = arguments("Cost of sampling and of structured output, as a share of the iteration.")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    gpu = {"device": "cpu", "dtype": args.dtype, "kv_bytes": "1GiB"}
    executor = make_executor(parse({"gpu": gpu, "cpu_attn": {"kv_bytes": 0}}, "benchmark"))
    num_sequences = args.sequences * len(kinds())
    limits = Limits(num_sequences, args.sequences * PROMPT_TOKENS, PROMPT_TOKENS + (WARM_UP + args.turns) * TURN + 1)
    executor.open_epoch(1, limits, None)
    measured = measure(executor, args.sequences, args.turns)
    executor.close_epoch()
    assert executor.grammars is not None
    executor.grammars.close()
    plain_s = statistics.median(measured["greedy"].iteration_s)
    rows = []
    for name, kind in measured.items():
        share = statistics.median(s / whole for s, whole in zip(kind.sampling_s, kind.iteration_s, strict=True))
        sampling_s, iteration_s = statistics.median(kind.sampling_s), statistics.median(kind.iteration_s)
        detail = f"{sampling_s * 1e3:.2f} of {iteration_s * 1e3:.1f} ms; iteration x {iteration_s / plain_s:.3f}"
        rows.append(Row(name, share, "logits to tokens / iteration", TARGET, at_least=False, detail=detail))
    about = (
        f"An iteration of {args.sequences} decodes of SmolLM2-135M-Instruct, vocabulary 49,152, on device cpu with "
        f"{torch.get_num_threads()} threads, all of one kind. Masks of grammars are worked out beside the layers of "
        "the next iteration: the wait for them counts here, and what they take from the layers shows in the "
        "iteration's length beside the greedy one's. Medians over iterations; kinds take turns."
    )
    publish("sampling", "Sampling", "make bench-sampling", about, rows, args.publish)


if __name__ == "__main__":
    main()
