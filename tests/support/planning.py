"""What tests of the scheduler share: above all an executor that computes nothing but checks every plan as strictly as a
real one, down to what each block holds."""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

from planner_svc.estimator import DecodePoint, Estimator, LinearPoint, OperationTables, PrefillPoint, TableEstimator
from planner_svc.scheduler import Capacity, ModePolicy, Scheduler, SequenceRequest, TokenEvent
from svc_common.plan import (
    CohortStep,
    IterationPlan,
    IterationResult,
    Mode,
    PrefillChunk,
    Sampling,
    Tier,
    Timings,
    TokenLogprobs,
)


def make_capacity(
    gpu_blocks: int,
    host_blocks: int | tuple[int, ...],
    *,
    block_tokens: int = 4,
    max_sequences: int = 16,
    max_batch_tokens: int = 32,
    max_sequence_tokens: int = 1000,
) -> Capacity:
    """Small enough to be full soon. `host_blocks`: of one pool, or of several."""
    pools = (host_blocks,) if isinstance(host_blocks, int) else host_blocks
    return Capacity(
        gpu_blocks, pools, block_tokens, max_sequences, max_batch_tokens, max_sequence_tokens, block_bytes=1024
    )


NUM_TOKEN_IDS = 23
_CPU_MODES = {Mode.GPU_ONLY, Mode.ASYMMETRIC, Mode.SAME_LAYER}
POSSIBLE_MODES: dict[str, set[Mode]] = {
    "auto": set(Mode),
    "gpu_only": {Mode.GPU_ONLY},
    "asymmetric": _CPU_MODES,
    "same_layer": {Mode.GPU_ONLY, Mode.SAME_LAYER},
    "decoupled": {Mode.GPU_ONLY, Mode.DECOUPLED},
}


def token_after(prompt: tuple[int, ...], index: int) -> int:
    """The token number `index` that the fabricated model generates for a prompt."""
    return (sum((place + 3) * token for place, token in enumerate(prompt)) + 11 * index * index + len(prompt)) % (
        NUM_TOKEN_IDS
    )


def expected_tokens(prompt: tuple[int, ...], max_new_tokens: int, end_token_ids: frozenset[int]) -> list[int]:
    """All that a request must be sent."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in end_token_ids):
        tokens.append(token_after(prompt, len(tokens)))
    return tokens


def make_estimator(
    *, linear_floor_s: float = 1e-3, linear_token_s: float = 1e-5, cpu_token_s: float = 1e-5, num_layers: int = 2
) -> TableEstimator:
    """Linear operations cost a floor and then by token; attention by context token, on the GPU a tenth of the CPU's."""
    knee = max(1, round(linear_floor_s / linear_token_s)) if linear_token_s else 1
    linear = (
        LinearPoint(1, linear_floor_s),
        LinearPoint(knee + 1, linear_floor_s),
        LinearPoint(2 * knee + 1, linear_floor_s + knee * linear_token_s),
    )

    def decode(token_s: float) -> tuple[DecodePoint, ...]:
        return tuple(DecodePoint(n, n * mean, n * mean * token_s) for n in (1, 100) for mean in (1, 1000))

    return TableEstimator(
        OperationTables(
            linear=linear,
            prefill=tuple(PrefillPoint(c, p, c * (c + p) * 1e-9) for c in (1, 512) for p in (0, 4096)),
            gpu_decode=decode(cpu_token_s / 10),
            cpu_decode=decode(cpu_token_s),
            head=(LinearPoint(1, 1e-4), LinearPoint(101, 2e-4)),
            swap_bytes_per_s=1e9,
            iteration_s=1e-4,
        ),
        num_layers,
    )


@dataclass
class Known:
    """A sequence as the executor holds it."""

    tokens: list[int]
    num_prefill: int
    num_generated: int
    tier: Tier
    blocks: list[int]
    num_logprobs: int
    computed: int = 0


Cell = tuple[int, ...]  # the KV of one token: it depends on that and on all before it


@dataclass
class FakeExecutor:
    """Any contradiction in a plan fails an assertion."""

    capacity: Capacity
    epoch: int = 1
    policy: str = "auto"
    num_layers: int = 2
    num_iterations: int = 0
    sequences: dict[int, Known] = field(default_factory=dict)
    kv: dict[tuple[Tier, int, int], Cell] = field(default_factory=dict)
    modes: list[Mode] = field(default_factory=list)
    cpu_decodes: int = 0
    swaps: int = 0
    shared: set[tuple[Tier, int]] = field(default_factory=set)
    """Blocks with several owners."""
    times_shared: int = 0
    step: CohortStep | None = None
    """The latest part of a cohort's step under way."""

    def run(self, plan: IterationPlan, total_ns: int = 1_000_000) -> IterationResult:
        """Checks and performs a plan, in the order the contract gives."""
        assert plan.epoch == self.epoch
        assert plan.iteration == self.num_iterations + 1
        self.num_iterations += 1
        self._apply_differences(plan)
        self._check_ownership(plan)
        tokens = self._compute(plan)
        logprobs = {
            sequence_id: TokenLogprobs(-0.5, ())
            for sequence_id, _ in tokens
            if self.sequences[sequence_id].num_logprobs >= 0
        }
        return IterationResult(
            self.epoch, plan.iteration, tokens, logprobs=logprobs, timings=Timings(total_ns=total_ns)
        )

    def _apply_differences(self, plan: IterationPlan) -> None:
        assert len(set(plan.released)) == len(plan.released)
        held = set(self.step.sequence_ids) if self.step else set()
        assert held.isdisjoint(plan.released), "released in a step"
        assert held.isdisjoint(swap.sequence_id for swap in plan.swaps), "moved in a step"
        for sequence_id in plan.released:
            del self.sequences[sequence_id]
        self._check_vacated_host_blocks(plan)
        for new in plan.new_sequences:
            assert new.sequence_id not in self.sequences
            assert new.token_ids
            assert new.num_cached_tokens % self.capacity.block_tokens == 0
            assert 0 <= new.num_cached_tokens < len(new.token_ids)
            self.sequences[new.sequence_id] = Known(
                tokens=list(new.token_ids),
                num_prefill=len(new.token_ids),
                num_generated=new.num_generated_tokens,
                tier=new.tier,
                blocks=list(new.blocks),
                num_logprobs=new.sampling.num_logprobs,
                computed=new.num_cached_tokens,
            )
            self._attend(self.sequences[new.sequence_id])
        assert len(self.sequences) <= self.capacity.max_sequences
        targets = [swap.target for swap in plan.swaps]
        assert targets == sorted(targets, key=lambda target: target is Tier.GPU), "to the host first"
        assert len({swap.sequence_id for swap in plan.swaps}) == len(plan.swaps)
        introduced = {new.sequence_id for new in plan.new_sequences}
        for swap in plan.swaps:
            assert swap.sequence_id not in introduced
            self._move(swap.sequence_id, swap.target, list(swap.blocks))
        for more in plan.new_blocks:
            assert more.blocks
            self.sequences[more.sequence_id].blocks += more.blocks

    def _check_vacated_host_blocks(self, plan: IterationPlan) -> None:
        """Those of swaps to the GPU are read after the host is written: no one may own them in the same plan."""
        leaving = [swap.sequence_id for swap in plan.swaps if swap.target is Tier.GPU]
        vacated = {block for sequence_id in leaving for block in self.sequences[sequence_id].blocks}
        arriving = {swap.sequence_id for swap in plan.swaps if swap.target is Tier.HOST}
        arriving |= {key for key, known in self.sequences.items() if known.tier is Tier.HOST and key not in leaving}
        for new in plan.new_sequences:
            assert new.tier is Tier.GPU or vacated.isdisjoint(new.blocks)
        for swap in plan.swaps:
            assert swap.target is Tier.GPU or vacated.isdisjoint(swap.blocks)
        for more in plan.new_blocks:
            assert more.sequence_id not in arriving or vacated.isdisjoint(more.blocks)

    def _move(self, sequence_id: int, target: Tier, blocks: list[int]) -> None:
        known = self.sequences[sequence_id]
        assert known.tier is not target
        assert len(blocks) == len(known.blocks)
        self.swaps += 1
        size = self.capacity.block_tokens
        for source_block, target_block in zip(known.blocks, blocks, strict=True):
            for offset in range(size):
                cell = self.kv.get((known.tier, source_block, offset))
                self.kv.pop((target, target_block, offset), None)
                if cell is not None:
                    self.kv[target, target_block, offset] = cell
        known.tier, known.blocks = target, blocks

    def _check_ownership(self, plan: IterationPlan) -> None:
        self.shared.clear()
        for tier in Tier:
            num_blocks = self.capacity.gpu_blocks if tier is Tier.GPU else self.capacity.host_blocks
            owners = self._owners(tier)
            assert all(0 <= block < num_blocks for block in owners)
            for block, sharers in owners.items():
                if len(sharers) > 1:
                    self._check_shared(block, sharers)
                    self.shared.add((tier, block))
        self.times_shared += len(self.shared)
        for known in self.sequences.values():
            if known.tier is Tier.HOST:
                assert len(set(map(self.pool_of, known.blocks))) == 1, "a sequence in two pools"

    def _owners(self, tier: Tier) -> dict[int, list[tuple[Known, int]]]:
        """By block: who owns it, and where in its table it stands."""
        owners: dict[int, list[tuple[Known, int]]] = {}
        for known in self.sequences.values():
            for place, block in enumerate(known.blocks if known.tier is tier else ()):
                owners.setdefault(block, []).append((known, place))
        return owners

    def _check_shared(self, block: int, owners: list[tuple[Known, int]]) -> None:
        """Only full, computed blocks with the same content have several owners."""
        first, place = owners[0]
        end = (place + 1) * self.capacity.block_tokens
        for known, at in owners:
            assert at == place, f"block {block} at two places"
            assert known.computed >= end, f"block {block} shared before it is full"
            assert known.tokens[:end] == first.tokens[:end], f"block {block} shared by those that differ"

    def pool_of(self, block: int) -> int:
        """The host pool that a block lies in."""
        return bisect_right([*accumulate(self.capacity.host_pools)], block)

    def blocks_used(self, tier: Tier) -> int:
        return len(self._owners(tier))

    def _compute(self, plan: IterationPlan) -> tuple[tuple[int, int], ...]:
        batches = plan.sub_batches
        assert len(batches) <= 2
        assert all(batch.num_tokens for batch in batches), "an empty sub-batch"
        assert not any(batch.gpu_decodes for batch in batches[1:])
        assert sum(batch.num_tokens for batch in batches) <= self.capacity.max_batch_tokens
        cpu_decodes = [sequence_id for batch in batches for sequence_id in batch.cpu_decodes]
        if plan.cohort:
            assert plan.mode is Mode.DECOUPLED
            assert len(batches) <= 1
            assert not cpu_decodes
        else:
            assert self.step is None, "a step abandoned"
            expected = (Mode.SAME_LAYER, Mode.SAME_LAYER, Mode.ASYMMETRIC)[len(batches)]
            assert plan.mode is (expected if cpu_decodes else Mode.GPU_ONLY)
        assert plan.mode in POSSIBLE_MODES[self.policy]
        if batches or plan.cohort:
            self.modes.append(plan.mode)
        self.cpu_decodes += len(cpu_decodes)
        computed: list[int] = []
        tokens: list[tuple[int, int]] = []
        for batch in batches:
            for chunk in batch.prefills:
                computed.append(chunk.sequence_id)
                tokens += self._prefill(chunk)
            for decodes, tier in ((batch.gpu_decodes, Tier.GPU), (batch.cpu_decodes, Tier.HOST)):
                for sequence_id in decodes:
                    computed.append(sequence_id)
                    tokens.append(self._decode(sequence_id, tier))
        if plan.cohort:
            computed += plan.cohort.sequence_ids
            tokens += self._step(plan.cohort, plan)
        split = {chunk.sequence_id for batch in batches[1:] for chunk in batch.prefills}
        split &= {chunk.sequence_id for batch in batches[:1] for chunk in batch.prefills}
        assert len(set(computed)) == len(computed) - len(split), "a sequence twice in an iteration"
        grown = {more.sequence_id for more in plan.new_blocks}
        assert grown <= set(computed), "blocks for a sequence that does not compute"
        return tuple(tokens)

    def _prefill(self, chunk: PrefillChunk) -> list[tuple[int, int]]:
        known = self.sequences[chunk.sequence_id]
        assert chunk.num_tokens > 0
        assert chunk.start == known.computed
        assert chunk.start + chunk.num_tokens <= known.num_prefill
        if self.policy == "gpu_only":
            assert known.tier is Tier.GPU
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            self._store(known, position)
        known.computed += chunk.num_tokens
        self._attend(known)
        return [self._sample(chunk.sequence_id, known)] if known.computed == known.num_prefill else []

    def _decode(self, sequence_id: int, tier: Tier) -> tuple[int, int]:
        known = self.sequences[sequence_id]
        assert known.tier is tier
        assert known.computed >= known.num_prefill, "decodes before its prompt is complete"
        assert known.computed == len(known.tokens) - 1
        self._store(known, known.computed)
        known.computed += 1
        self._attend(known)
        return self._sample(sequence_id, known)

    def _step(self, part: CohortStep, plan: IterationPlan) -> list[tuple[int, int]]:
        """The token's KV is written from the first part on, and its sequences keep it untouched until the last."""
        assert part.sequence_ids
        assert part.num_layers > 0
        num_tokens = len(part.sequence_ids) + sum(batch.num_tokens for batch in plan.sub_batches)
        assert num_tokens <= self.capacity.max_batch_tokens
        if part.start_layer == 0:
            assert self.step is None
            for sequence_id in part.sequence_ids:
                known = self.sequences[sequence_id]
                assert known.tier is Tier.HOST
                assert known.num_prefill <= known.computed == len(known.tokens) - 1
                self._store(known, known.computed)
        else:
            assert self.step is not None
            assert part.sequence_ids == self.step.sequence_ids
            assert part.start_layer == self.step.start_layer + self.step.num_layers
            assert not {more.sequence_id for more in plan.new_blocks} & set(part.sequence_ids)
        end = part.start_layer + part.num_layers
        assert end <= self.num_layers
        self.step = part if end < self.num_layers else None
        if self.step:
            return []
        self.cpu_decodes += len(part.sequence_ids)
        for sequence_id in part.sequence_ids:
            self.sequences[sequence_id].computed += 1
            self._attend(self.sequences[sequence_id])
        return [self._sample(sequence_id, self.sequences[sequence_id]) for sequence_id in part.sequence_ids]

    def _store(self, known: Known, position: int) -> None:
        block, offset = divmod(position, self.capacity.block_tokens)
        assert block < len(known.blocks), "no block for this token"
        assert (known.tier, known.blocks[block]) not in self.shared, "writes into a shared block"
        self.kv[known.tier, known.blocks[block], offset] = tuple(known.tokens[: position + 1])

    def _attend(self, known: Known) -> None:
        """Reads all KV of a sequence: a block reused too early, or copied wrongly, shows here."""
        for position in range(known.computed):
            block, offset = divmod(position, self.capacity.block_tokens)
            cell = self.kv.get((known.tier, known.blocks[block], offset))
            assert cell == tuple(known.tokens[: position + 1])

    def _sample(self, sequence_id: int, known: Known) -> tuple[int, int]:
        prompt = tuple(known.tokens[: len(known.tokens) - known.num_generated])
        token = token_after(prompt, known.num_generated)
        known.tokens.append(token)
        known.num_generated += 1
        return sequence_id, token


class Loop:
    """Drives a scheduler and a checking executor; `streams` holds what each sequence was sent."""

    def __init__(
        self,
        capacity: Capacity,
        policy: ModePolicy = "auto",
        estimator: Estimator | None = None,
        max_waiting: int = 1000,
        executor_type: type[FakeExecutor] = FakeExecutor,
    ) -> None:
        self.capacity, self.policy = capacity, policy
        self.estimator = estimator or make_estimator()
        self.scheduler = Scheduler(capacity, self.estimator, policy, max_waiting)
        self.executor = executor_type(capacity, policy=policy, num_layers=self.estimator.num_layers)
        self.num_requests = 0
        self.plans: list[IterationPlan] = []
        self.unapplied: deque[IterationPlan] = deque()
        self.requests: dict[int, SequenceRequest] = {}
        self.streams: dict[int, list[int]] = {}
        self.finishes: dict[int, str] = {}

    def add(self, num_prompt_tokens: int, max_new_tokens: int, end_token_ids: frozenset[int] = frozenset()) -> int:
        """A request whose prompt differs from its neighbours'."""
        self.num_requests += 1
        number = self.num_requests
        prompt = tuple((number * 7 + place) % NUM_TOKEN_IDS for place in range(num_prompt_tokens))
        request = SequenceRequest(prompt, max_new_tokens, Sampling(seed=number), end_token_ids)
        sequence_id = self.scheduler.add(request, now=0.0)
        self.requests[sequence_id] = request
        self.streams[sequence_id] = []
        return sequence_id

    def plan(self) -> IterationPlan | None:
        """Makes a plan and leaves it in flight."""
        plan = self.scheduler.plan(now=0.0)
        if plan is not None:
            self.plans.append(plan)
            self.unapplied.append(plan)
        return plan

    def apply(self) -> tuple[TokenEvent, ...]:
        """Runs and applies the oldest plan in flight."""
        events = self.scheduler.apply(self.executor.run(self.unapplied.popleft()), now=0.0).tokens
        for event in events:
            self.streams[event.sequence_id].append(event.token_id)
            if event.finish:
                self.finishes[event.sequence_id] = event.finish
        return events

    def cancel(self, sequence_id: int) -> None:
        """The caller leaves; what is in flight must not reach it."""
        self.scheduler.finish(sequence_id)
        del self.requests[sequence_id], self.streams[sequence_id]

    def reset(self, capacity: Capacity | None = None) -> None:
        """A new executor, of the same size unless told otherwise; those that fit nowhere are forgotten."""
        epoch = self.executor.epoch + 1
        self.capacity = capacity or self.capacity
        for sequence_id in self.scheduler.reset(self.capacity, self.estimator, epoch):
            del self.requests[sequence_id], self.streams[sequence_id]
        self.unapplied.clear()
        self.executor = type(self.executor)(self.capacity, epoch, self.policy, self.estimator.num_layers)

    def step(self) -> IterationPlan:
        """One plan, run and applied before the next."""
        plan = self.plan()
        assert plan is not None
        self.apply()
        return plan

    def run_until_idle(self, max_iterations: int = 100_000) -> None:
        """One plan ahead, to the end; then every request has had exactly its tokens, and nothing is held."""
        for _ in range(max_iterations):
            while self.scheduler.has_work() and self.plan():
                pass
            if not self.unapplied:
                break
            self.apply()
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.executor.sequences == {}
        assert self.scheduler.gpu_blocks_used == self.scheduler.host_blocks_used == 0
        for sequence_id, request in self.requests.items():
            expected = expected_tokens(request.prompt, request.max_new_tokens, request.end_token_ids)
            assert self.streams[sequence_id] == expected
