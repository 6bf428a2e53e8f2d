"""Random loads under memory pressure, long enough for every way of making room."""

import contextlib
import random
from collections import Counter
from dataclasses import replace

from planner_svc.scheduler import AdmissionError
from support.planning import NUM_TOKEN_IDS, FakeExecutor, Loop, make_capacity, make_estimator


def make_loop(rng: random.Random, executor_type: type[FakeExecutor]) -> Loop:
    capacity = make_capacity(
        rng.randint(0, 24),
        rng.choice([rng.randint(0, 30), (rng.randint(0, 15), rng.randint(0, 15), rng.randint(0, 15))]),
        block_tokens=rng.randint(1, 5),
        max_sequences=rng.randint(1, 20),
        max_batch_tokens=rng.choice([1, 5, 12, 40]),
        max_sequence_tokens=rng.randint(20, 100),
    )
    estimator = make_estimator(
        linear_floor_s=rng.choice([1e-6, 1e-3, 1e-2]),
        cpu_token_s=rng.choice([1e-3, 1e-4, 1e-5, 1e-6]),
        num_layers=rng.choice([1, 3, 8]),
    )
    return Loop(
        capacity,
        rng.choice(["auto", "auto", "asymmetric", "gpu_only", "same_layer", "decoupled"]),
        estimator,
        executor_type=executor_type,
    )


def arrive(loop: Loop, rng: random.Random) -> None:
    end_token_ids = frozenset({rng.randrange(NUM_TOKEN_IDS)}) if rng.random() < 0.3 else frozenset()
    with contextlib.suppress(AdmissionError):
        loop.add(rng.randint(1, 40), rng.randint(1, 30), end_token_ids)


def disturb(loop: Loop, rng: random.Random) -> None:
    """A caller leaves, or the executor starts again."""
    running = sorted(loop.streams.keys() - loop.finishes.keys())
    if running and rng.random() < 0.05:
        loop.cancel(rng.choice(running))
    if rng.random() < 0.005:
        pools = loop.capacity.host_pools
        lost = rng.randrange(len(pools))
        is_loss = rng.random() < 0.5
        kept = tuple(0 if is_loss and pool == lost else size for pool, size in enumerate(pools))
        loop.reset(replace(loop.capacity, host_pools=kept))


def run_load(seed: int, executor_type: type[FakeExecutor] = FakeExecutor) -> Counter[str]:
    """Each stream ends with its own tokens. Returns the scheduler's counters."""
    rng = random.Random(seed)
    loop = make_loop(rng, executor_type)
    num_arrivals, rate, ahead = rng.randint(5, 40), rng.choice([0.1, 0.4, 0.9]), rng.random() < 0.8
    while num_arrivals:
        while num_arrivals and rng.random() < rate:
            arrive(loop, rng)
            num_arrivals -= 1
        disturb(loop, rng)
        while loop.scheduler.has_work() and loop.plan() and ahead:
            pass
        if loop.unapplied:
            loop.apply()
    loop.run_until_idle()
    counters = loop.scheduler.counters
    return Counter({name: getattr(counters, name) for name in counters.__dataclass_fields__})
