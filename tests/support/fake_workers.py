"""gpu_svc and cpu_attn_svc as the planner sees them over gRPC: real servers, fabricated tokens, no model.

FakeExecutor checks what the protocol promises it, so that a planner that breaks a promise fails its test.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from neoflex.v1 import cpu_attention_pb2, cpu_attention_pb2_grpc, executor_pb2, executor_pb2_grpc
from support.fake_cohort import FakeCohort

BLOCK_BYTES = 1000
HOST_BLOCK_BYTES = 600

Answer = Callable[[tuple[int, ...], int], int]
"""Token number `index` of the answer to a prompt."""


def alphabet(prompt: tuple[int, ...], index: int) -> int:
    """Letters from `a` on as byte-level tokens, starting where the prompt says."""
    return (sum(prompt) + index) % 26 + ord("a") - ord("!")


@dataclass
class Held:
    """A sequence as the executor knows it."""

    tokens: list[int]
    num_prompt_tokens: int
    tier: int
    blocks: list[int]
    num_logprobs: int
    num_prompt_logprobs: int = -1
    has_grammar: bool = False
    num_computed: int = 0


@dataclass
class FakeExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """Yields `answer` for each sequence. `gate` cleared: it freezes before its next iteration."""

    gpu_blocks: int = 64
    host_blocks: int = 0
    """Of each host."""
    answer: Answer = alphabet
    hosts: "list[FakeHost]" = field(default_factory=list)
    iteration_s: float = 0.0
    open_s: float = 0.0
    """How long opening an epoch takes."""
    block_tokens: int = 4
    num_layers: int = 2
    """As planner_rig.SPEC has."""
    threads_needed: int = 1
    """Of the host, for attention to stay hidden."""

    model_digest: str = ""
    """Of the model that it says it has read."""
    num_opening: int = 0
    """Epochs that it was asked to open."""
    refuses_epoch: Callable[[executor_pb2.OpenEpochRequest], str] = lambda request: ""
    """Why it does not open one."""
    deadly: Callable[[tuple[int, ...], int], bool] = lambda prompt, num_generated: False
    """Whether computing this sequence brings it down; it is back at once."""
    num_deaths: int = 0
    not_finite: Callable[[tuple[int, ...], int], bool] = lambda prompt, num_generated: False
    """Whether the model computes NaN for this sequence."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fail_next: tuple[int, str] | None = None
    """Error and text of the next iteration."""
    grammars: list[str] = field(default_factory=list)
    """That it was asked to make ready."""
    grammar_error: str = ""
    """Its answer to that."""
    failing_grammar: str = ""
    """Why each second token of a sequence with a grammar fails."""
    epochs: list[executor_pb2.OpenEpochRequest] = field(default_factory=list)
    plans: list[executor_pb2.IterationPlan] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    most_plans_waiting: int = 0
    stopping: bool = False
    """As it says itself."""
    problems: list[str] = field(default_factory=list)
    """Promises that the planner broke."""
    num_streams: int = 0
    """Of plans, that are open."""

    def __post_init__(self) -> None:
        self.gate.set()
        self._address = "127.0.0.1:0"
        self._epoch = 0
        """Of this life."""
        self._epoch_over = False
        self._cohort = FakeCohort(self.num_layers, self.block_tokens)
        self._attached: list[FakeHost] = []

    # --- process control

    async def start(self) -> str:
        """Listens, on the same port as before after a `kill`."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self._address)
        self._address = f"127.0.0.1:{port}"
        await self._server.start()
        return self._address

    async def kill(self) -> None:
        """Breaks every stream and forgets everything."""
        await self.disconnect()
        self.held.clear()
        self._epoch = 0

    async def disconnect(self) -> None:
        """Breaks every stream and lives on."""
        await self._server.stop(0)

    # --- the service

    async def GetExecutorStatus(self, request: Any, context: Any) -> executor_pb2.GetExecutorStatusResponse:  # noqa: N802
        return executor_pb2.GetExecutorStatusResponse(epoch=self._epoch, stopping=self.stopping)

    async def CompileGrammar(self, request: Any, context: Any) -> executor_pb2.CompileGrammarResponse:  # noqa: N802
        self.grammars.append(request.grammar)
        return executor_pb2.CompileGrammarResponse(error=self.grammar_error)

    async def OpenEpoch(self, request: Any, context: Any) -> executor_pb2.OpenEpochResponse:  # noqa: N802
        if self.epochs and request.epoch <= self.epochs[-1].epoch:
            self.problems.append(f"epoch {request.epoch} does not follow {self.epochs[-1].epoch}")
        self.num_opening += 1
        await asyncio.sleep(self.open_s)
        self.epochs.append(request)
        if refusal := self.refuses_epoch(request):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        self._epoch = request.epoch
        self.held.clear()
        self._cohort = FakeCohort(self.num_layers, self.block_tokens)
        self._epoch_over = False
        attached = [host.open_region(request.epoch) for host in self.hosts]
        pools = [
            executor_pb2.HostPool(
                first_block=sum(attached[:i]) * self.host_blocks, num_blocks=self.host_blocks, num_threads=1
            )
            if is_attached
            else executor_pb2.HostPool(error="nobody there")
            for i, is_attached in enumerate(attached)
        ]
        response = executor_pb2.OpenEpochResponse(
            device="cpu",
            compute_dtype="fp32",
            kv_dtype="bf16",
            block_bytes=BLOCK_BYTES,
            host_kv_dtype="int8",
            host_block_bytes=HOST_BLOCK_BYTES,
            gpu_blocks=self.gpu_blocks,
            host_pools=pools,
            model_digest=self.model_digest,
        )
        if request.HasField("policy"):
            response.policy.CopyFrom(request.policy)
            if not any(attached):
                response.policy.CopyFrom(executor_pb2.ExecutionPolicy(resident_layers=self.num_layers))
        if request.profile:
            response.tables.CopyFrom(tables(any(attached)))
        self._attached = [host for host, is_attached in zip(self.hosts, attached, strict=True) if is_attached]
        return response

    async def Execute(self, requests: Any, context: Any) -> AsyncIterator[executor_pb2.ExecuteResponse]:  # noqa: N802
        waiting: asyncio.Queue[executor_pb2.IterationPlan | None] = asyncio.Queue()

        async def receive() -> None:
            async for request in requests:
                waiting.put_nowait(request.plan)
                self.most_plans_waiting = max(self.most_plans_waiting, waiting.qsize())
            waiting.put_nowait(None)

        receiver = asyncio.create_task(receive())
        self.num_streams += 1
        try:
            while plan := await waiting.get():
                await asyncio.sleep(self.iteration_s)
                await self.gate.wait()
                if self._dies_of(plan):
                    self.num_deaths += 1
                    self.held.clear()
                    self._epoch = 0
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                yield executor_pb2.ExecuteResponse(result=self._run(plan))
        finally:
            self.num_streams -= 1
            receiver.cancel()

    def _dies_of(self, plan: executor_pb2.IterationPlan) -> bool:
        known = {key: (held.tokens, held.num_prompt_tokens) for key, held in self.held.items()}
        for new in plan.new_sequences:
            known[new.sequence_id] = list(new.token_ids), len(new.token_ids) - new.num_generated_tokens
        ids = {chunk.sequence_id for batch in plan.sub_batches for chunk in batch.prefills}
        for batch in plan.sub_batches:
            ids |= {*batch.gpu_decode_sequence_ids, *batch.cpu_decode_sequence_ids}
        ids |= set(plan.cohort.sequence_ids)
        return any(self.deadly(tuple(tokens[:num]), len(tokens) - num) for tokens, num in map(known.__getitem__, ids))

    def _run(self, plan: executor_pb2.IterationPlan) -> executor_pb2.IterationResult:
        result = executor_pb2.IterationResult(epoch=plan.epoch, iteration=plan.iteration)
        if self._epoch_over or plan.epoch != self.epochs[-1].epoch:
            result.error = executor_pb2.EXECUTION_ERROR_STALE
            return result
        if self.fail_next:
            result.error, result.error_message = self.fail_next
            self.fail_next, self._epoch_over = None, True
            return result
        uses_host = plan.HasField("cohort") or any(batch.cpu_decode_sequence_ids for batch in plan.sub_batches)
        if uses_host and any(host.region_epoch != plan.epoch for host in self._attached):
            result.error = executor_pb2.EXECUTION_ERROR_CPU_ATTENTION_LOST
            self._epoch_over = True
            return result
        self.plans.append(plan)
        self.problems += self._cohort.problems_of_changes(plan)
        self._apply_changes(plan)
        self.problems += self._cohort.problems_of_work(plan, self.held)
        for batch in plan.sub_batches:
            self._compute(batch, result)
        if plan.HasField("cohort"):
            for sequence_id in self._cohort.advance(plan.cohort):
                self.held[sequence_id].num_computed += 1
                self._yield_token(sequence_id, result)
        self._check_blocks()
        result.timings.total_ns = 1000
        if uses_host:
            self._attend_on_host(plan, result)
        if plan.trace:
            result.trace.CopyFrom(trace(plan))
        return result

    def _attend_on_host(self, plan: executor_pb2.IterationPlan, result: executor_pb2.IterationResult) -> None:
        """Attention takes as long as the rest with `threads_needed` threads, and is waited for with fewer."""
        result.cpu_attended_tokens = sum(len(batch.cpu_decode_sequence_ids) for batch in plan.sub_batches)
        attention_ns = 1000 * self.threads_needed // self.hosts[0].num_threads
        result.timings.cpu_attention_ns = attention_ns
        result.timings.cpu_wait_ns = max(0, attention_ns - 1000)
        result.timings.total_ns = max(1000, attention_ns)

    def _apply_changes(self, plan: executor_pb2.IterationPlan) -> None:
        for sequence_id in plan.released_sequence_ids:
            del self.held[sequence_id]
        for new in plan.new_sequences:
            num_prompt_tokens = len(new.token_ids) - new.num_generated_tokens
            self.held[new.sequence_id] = Held(
                list(new.token_ids),
                num_prompt_tokens,
                new.tier,
                list(new.blocks),
                new.sampling.num_logprobs,
                new.sampling.num_prompt_logprobs,
                bool(new.sampling.grammar),
            )
            self.held[new.sequence_id].num_computed = new.num_cached_tokens
        for swap in plan.swaps:
            self.held[swap.sequence_id].tier = swap.target
            self.held[swap.sequence_id].blocks = list(swap.blocks)
        for grown in plan.new_blocks:
            self.held[grown.sequence_id].blocks += grown.blocks

    def _compute(self, batch: executor_pb2.SubBatch, result: executor_pb2.IterationResult) -> None:
        for chunk in batch.prefills:
            held = self.held[chunk.sequence_id]
            if chunk.start != held.num_computed:
                self.problems.append(f"chunk of {chunk.sequence_id} starts at {chunk.start}, not {held.num_computed}")
            if held.num_prompt_logprobs >= 0:
                self._yield_prompt(chunk, held, result)
            held.num_computed += chunk.num_tokens
            if held.num_computed == len(held.tokens):
                self._yield_token(chunk.sequence_id, result)
        decodes: list[tuple[int, int]] = [(i, executor_pb2.TIER_GPU) for i in batch.gpu_decode_sequence_ids]
        decodes += [(i, executor_pb2.TIER_HOST) for i in batch.cpu_decode_sequence_ids]
        for sequence_id, tier in decodes:
            held = self.held[sequence_id]
            if held.num_computed != len(held.tokens) - 1 or held.tier != tier:
                self.problems.append(f"sequence {sequence_id} cannot decode: {held}")
            held.num_computed += 1
            self._yield_token(sequence_id, result)

    @staticmethod
    def _yield_prompt(chunk: executor_pb2.PrefillChunk, held: Held, result: executor_pb2.IterationResult) -> None:
        """Token i has the log-probability -i; the likeliest are always 1, 2, ..."""
        places = range(chunk.start + 1, min(chunk.start + chunk.num_tokens + 1, held.num_prompt_tokens))
        if places:
            num_top = held.num_prompt_logprobs
            result.prompt_logprobs.add(
                sequence_id=chunk.sequence_id,
                start=places.start,
                chosen=[-float(i) for i in places],
                top_token_ids=[*range(1, num_top + 1)] * len(places),
                top_logprobs=[-0.5] * num_top * len(places),
            )

    def _yield_token(self, sequence_id: int, result: executor_pb2.IterationResult) -> None:
        held = self.held[sequence_id]
        prompt = tuple(held.tokens[: held.num_prompt_tokens])
        token = self.answer(prompt, len(held.tokens) - held.num_prompt_tokens)
        held.tokens.append(token)
        result.sequence_ids.append(sequence_id)
        result.token_ids.append(token)
        if self.not_finite(prompt, len(held.tokens) - 1 - held.num_prompt_tokens):
            result.not_finite_sequence_ids.append(sequence_id)
        if self.failing_grammar and held.has_grammar and len(held.tokens) == held.num_prompt_tokens + 2:
            result.grammar_failures.add(sequence_id=sequence_id, message=self.failing_grammar)
        if held.num_logprobs >= 0:
            likeliest = range(token, token + held.num_logprobs)
            result.logprobs.add(
                sequence_id=sequence_id,
                chosen=-0.5,
                top_token_ids=likeliest,
                top_logprobs=[-0.5 - i for i in range(held.num_logprobs)],
            )

    def _check_blocks(self) -> None:
        for tier in (executor_pb2.TIER_GPU, executor_pb2.TIER_HOST):
            owned = [block for held in self.held.values() if held.tier == tier for block in held.blocks]
            num_host_blocks = len(self._attached) * self.host_blocks
            if tier == executor_pb2.TIER_HOST and num_host_blocks and max(owned, default=0) >= num_host_blocks:
                self.problems.append(f"a host block that does not exist: {owned}")
            if len(owned) != len(set(owned)):
                self.problems.append(f"a block of tier {tier} has two owners")
        for sequence_id, held in self.held.items():
            if held.num_computed > len(held.blocks) * self.block_tokens:
                self.problems.append(f"sequence {sequence_id} has too few blocks: {held}")


class FakeHost(cpu_attention_pb2_grpc.CpuAttentionServiceServicer):
    """Says whose region it holds. FakeExecutor opens regions in it directly."""

    def __init__(self) -> None:
        self.region_epoch = 0
        self.num_threads = 1
        self.max_threads = 8
        self.set_threads: list[int] = []
        """Asked for, in order."""
        self.keeps_threads = False
        """Refuses to change them."""
        self.says_so = asyncio.Event()
        """Cleared: it changes them and does not answer."""
        self.says_so.set()
        self.alive = False
        self.refuses = False
        self.stopping = False
        """As it says itself; it opens no region any more then."""
        self._address = "127.0.0.1:0"

    async def start(self) -> str:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        cpu_attention_pb2_grpc.add_CpuAttentionServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self._address)
        self._address = f"127.0.0.1:{port}"
        await self._server.start()
        self.alive, self.region_epoch = True, 0
        return self._address

    async def kill(self) -> None:
        self.alive, self.region_epoch = False, 0
        await self._server.stop(0)

    def open_region(self, epoch: int) -> bool:
        if self.alive and not self.refuses and not self.stopping:
            self.region_epoch = epoch
            return True
        return False

    async def GetCpuAttentionStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return cpu_attention_pb2.GetCpuAttentionStatusResponse(
            epoch=self.region_epoch,
            num_threads=self.num_threads,
            max_threads=self.max_threads,
            stopping=self.stopping,
        )

    async def SetThreads(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.set_threads.append(request.num_threads)
        if self.keeps_threads:
            await context.abort(grpc.StatusCode.INTERNAL, "not now")
        self.num_threads = request.num_threads
        await self.says_so.wait()
        return cpu_attention_pb2.SetThreadsResponse(num_threads=self.num_threads)


def trace(plan: executor_pb2.IterationPlan) -> executor_pb2.IterationTrace:
    """One step of 1000 ns."""
    return executor_pb2.IterationTrace(
        epoch=plan.epoch,
        iteration=plan.iteration,
        mode=plan.mode,
        start_ns=1000 * plan.iteration,
        duration_ns=1000,
        gpu=executor_pb2.TraceEvents(
            kinds=[executor_pb2.TRACE_KIND_BOOKKEEPING],
            layers=[-1],
            sub_batches=[-1],
            offsets_ns=[0],
            durations_ns=[1000],
        ),
    )


def tables(with_host: bool) -> executor_pb2.OperationTables:
    """Times under which the CPU's attention hides behind linear operations."""

    def linear(seconds: float) -> Sequence[executor_pb2.LinearPoint]:
        return [executor_pb2.LinearPoint(num_tokens=n, seconds=seconds * (1 + n / 100)) for n in (1, 512)]

    def decode(seconds: float) -> Sequence[executor_pb2.DecodePoint]:
        return [
            executor_pb2.DecodePoint(num_sequences=n, context_tokens=n * context, seconds=seconds * (n + context / 100))
            for n in (1, 64)
            for context in (1, 1000)
        ]

    return executor_pb2.OperationTables(
        linear=linear(1e-3),
        prefill=[
            executor_pb2.PrefillPoint(chunk_tokens=chunk, past_tokens=past, seconds=1e-6 * (chunk + past))
            for chunk in (1, 512)
            for past in (0, 512)
        ],
        gpu_decode=decode(1e-6),
        cpu_decode=decode(1e-6) if with_host else [],
        head=linear(1e-4),
        swap_bytes_per_s=1e9,
        iteration_s=1e-4,
    )
