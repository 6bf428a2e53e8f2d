"""The serving scheduler over the real executor in one process, on the papers' lengths, with as much to do as it takes.

Time is the executor's: in the services the planner plans in a process of its own beside an iteration, so what a plan
takes is told by itself. Requests never run out, and what counts begins once the device is full.
"""

import math
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from gpu_check import absent
from gpu_check.cases import BLOCK_TOKENS, MODE_NAMES, Case, case_of, dummy_executor
from gpu_check.choices import open_epoch
from gpu_check.estimates import estimator
from gpu_check.host import Worker, cpu_attention
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.executor import Executor
from planner_svc.estimator import TableEstimator
from planner_svc.scheduler import Capacity, ModePolicy, Scheduler, SequenceRequest
from svc_common.plan import IterationPlan, Mode, Sampling

_MODES: tuple[ModePolicy, ...] = ("gpu_only", "auto", "asymmetric", "same_layer", "decoupled")
_WAITING = 32
"""Requests that are kept in the queue."""
_SHORTENED = 64
"""Requests that begin in the middle of their answers, in a manner of speaking."""
_FEW = 20
"""Requests that must have ended for a rate to mean anything."""
_WARM_UP = 0.4
"""Share of the time that does not count."""
_LEAST = 20
"""Iterations that count, whatever time there is."""
_SERVING = 0.6
"""Share of the stage's time in which it serves; the rest goes for weights, pools and measuring operations."""


@dataclass
class _Served:
    """What came of one run, without its beginning."""

    seconds: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    num_finished: int = 0
    modes: Counter[Mode] = field(default_factory=Counter)
    errors: list[float] = field(default_factory=list)
    """predicted / measured - 1, by iteration."""
    plan_s: list[float] = field(default_factory=list)


def requests(case: Case) -> Iterator[SequenceRequest]:
    """Without end; the same for all modes. Lengths are uniform within a tenth of their means.

    The first ones have only a part of their answers left, as those have that are in hand at any moment: else all would
    be computed at once and end at once.
    """
    generator = random.Random(0)

    def length(mean: int) -> int:
        return max(1, round(generator.uniform(0.9, 1.1) * mean))

    for number in count():
        prompt = tuple(generator.choices(range(case.spec.vocab_size), k=length(case.prompt_tokens)))
        share = generator.random() if number < _SHORTENED else 1.0
        yield SequenceRequest(prompt, math.ceil(share * length(case.output_tokens)), Sampling(), frozenset())


def run(setting: Setting, report: Report, case_name: str) -> None:
    case = case_of(case_name, setting)
    reason = absent.lacking_host_tier()
    if not setting.on_cuda and absent.lacking(*absent.EXTENSION_MODULES):
        report.not_run("all", "device cpu computes with the C++ extensions")
        return
    with (
        nullcontext() if reason else cpu_attention(setting) as worker,
        dummy_executor(case, setting, report, worker.kv_bytes if worker else 0) as executor,
    ):
        if executor is not None:
            _serve_all(setting, report, case, case_name, executor, worker)
    if reason:
        report.not_run("all modes but GPU-only", reason)


def _serve_all(
    setting: Setting, report: Report, case: Case, case_name: str, executor: Executor, worker: Worker | None
) -> None:
    modes = _MODES if worker else _MODES[:1]
    seconds = setting.seconds * _SERVING / len(modes)
    base_per_s = 0.0
    for epoch, mode in enumerate(modes, start=1):
        executor.close_epoch()  # The worker holds one region at a time.
        both = worker if mode != "gpu_only" else None
        attach = partial(both.attach, executor, epoch, case.limits) if both else _no_host
        host = open_epoch(report, executor, epoch, case.limits, attach)
        estimates = estimator(executor, setting, report, case_name, both is not None)
        capacity = Capacity(
            gpu_blocks=executor.num_gpu_blocks(),
            host_pools=host.pool_blocks if host else (),
            block_tokens=BLOCK_TOKENS,
            max_sequences=case.limits.max_sequences,
            max_batch_tokens=case.limits.max_batch_tokens,
            max_sequence_tokens=case.limits.max_sequence_tokens,
            block_bytes=executor.kv_shape.host_block_bytes,
        )
        per_s = _serve_one(report, case, executor, capacity, estimates, mode, epoch, seconds, base_per_s)
        base_per_s = base_per_s or per_s


def _no_host() -> None:
    """GPU-only has no host tier."""


def _serve_one(
    report: Report,
    case: Case,
    executor: Executor,
    capacity: Capacity,
    estimates: TableEstimator,
    mode: ModePolicy,
    epoch: int,
    seconds: float,
    base_per_s: float,
) -> float:
    """Output tokens a second."""
    scheduler = Scheduler(capacity, estimates, mode, _WAITING, epoch)
    served = _drive(scheduler, executor, requests(case), seconds)
    per_s, num = served.output_tokens / served.seconds, sum(served.modes.values())
    mix = ", ".join(f"{count / num:.0%} {MODE_NAMES[each.value]}" for each, count in served.modes.most_common())
    plan_ms = statistics.median(served.plan_s) * 1e3
    prompts_per_s = served.prompt_tokens / served.seconds
    detail = (
        f"{per_s:.0f} output tokens/s, {prompts_per_s:.0f} prompt tokens/s, {num / served.seconds:.1f} iterations/s "
    )
    detail += f"({mix}); {served.num_finished} requests ended in {served.seconds:.1f} s"
    detail += ", too few for a rate: --budget-s" if served.num_finished < _FEW else ""
    detail += f"; a plan takes {plan_ms:.2f} ms"
    figures: dict[str, Any] = {
        "output_tokens_per_s": per_s,
        "prompt_tokens_per_s": prompts_per_s,
        "num_finished": served.num_finished,
        "seconds": served.seconds,
        "num_iterations": num,
        "plan_ms": plan_ms,
    }
    ratio, of = (per_s / base_per_s, "x GPU-only") if base_per_s else (None, "")
    report.figure(f"served, {MODE_NAMES[mode]}", detail, ratio, of, **figures)
    sizes = sorted(map(abs, served.errors))
    median, p95 = statistics.median(sizes), sizes[int(0.95 * len(sizes))]
    bias = statistics.fmean(served.errors)
    detail = f"95th percentile {p95:.1%}, mean {bias:+.1%}, {len(sizes)} iterations"
    report.figure(
        f"estimator, {MODE_NAMES[mode]}", detail, median, "|predicted / measured - 1|, median", p95=p95, mean=bias
    )
    return per_s


def _drive(scheduler: Scheduler, executor: Executor, coming: Iterator[SequenceRequest], seconds: float) -> _Served:
    """One plan runs and one waits, as in the services. For `seconds` of the clock."""
    now, served = 0.0, _Served()
    waiting: deque[IterationPlan] = deque()
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < seconds or len(served.errors) < _LEAST:
        counts = now > 0 and time.monotonic() - begin_s > _WARM_UP * seconds
        while scheduler.num_waiting < _WAITING:
            scheduler.add(next(coming), now)
        start_s = time.perf_counter()
        while (planned := scheduler.plan(now)) is not None:
            waiting.append(planned)
        plan_s = time.perf_counter() - start_s
        plan = waiting.popleft()
        result = executor.run(plan)
        if result.error is not None:
            raise RuntimeError(f"{plan.mode.value}: {result.error_message}")
        took_s = result.timings.total_ns / 1e9
        now += took_s
        tokens = scheduler.apply(result, now).tokens
        if counts:
            served.seconds += took_s
            served.output_tokens += len(tokens)
            served.prompt_tokens += sum(chunk.num_tokens for batch in plan.sub_batches for chunk in batch.prefills)
            served.num_finished += sum(event.finish is not None for event in tokens)
            served.modes[plan.mode] += 1
            served.errors.append(plan.predicted_s / took_s - 1)
            served.plan_s.append(plan_s)
    return served
