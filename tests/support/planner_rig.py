"""A whole planner over loopback: its real server, engine and clients, with fabricated workers behind it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from neoflex.v1 import inference_pb2 as pb
from neoflex.v1 import inference_pb2_grpc
from planner_svc.requests import Limits
from planner_svc.server import PlannerServer
from planner_svc.servicer import ServedModel
from support import tiny_tokenizers
from support.fake_workers import FakeExecutor, FakeHost
from svc_common.model.spec import ModelSpec, RopeSpec
from svc_common.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
CONTEXT_TOKENS = 200
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=TOKENIZER.vocab_size,
    context_tokens=CONTEXT_TOKENS,
    norm_eps=1e-5,
    rope=RopeSpec(theta=10_000.0, rotary_dim=4),
    tie_embeddings=True,
    eos_token_ids=TOKENIZER.eos_token_ids,
    checkpoint_dtype="fp32",
)
MODEL = ServedModel(
    name="tiny",
    spec=SPEC,
    tokenizer=TOKENIZER,
    limits=Limits(TOKENIZER.vocab_size, CONTEXT_TOKENS, max_text_bytes=10_000),
    eos_token_ids=TOKENIZER.eos_token_ids,
    block_tokens=4,
    version="1.2.3",
)


@dataclass
class Rig:
    """A planner with everything around it."""

    server: PlannerServer
    executor: FakeExecutor
    hosts: list[FakeHost]
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    @property
    def host(self) -> FakeHost | None:
        """The first."""
        return self.hosts[0] if self.hosts else None

    async def is_serving(self, name: str = "readiness") -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=name))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until(self, holds: Callable[[], Awaitable[bool] | bool]) -> None:
        """Waits for a condition; the test's own time limit is the only one."""
        while True:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.01)

    async def until_ready(self) -> None:
        await self.until(self.is_serving)

    async def load(self) -> pb.GetLoadResponse:
        answer = await self.stub.GetLoad(pb.GetLoadRequest())
        assert isinstance(answer, pb.GetLoadResponse)
        return answer

    async def until_free(self) -> None:
        """Until neither the planner nor the executor holds anything."""

        async def is_free() -> bool:
            load = await self.load()
            blocks = load.gpu_blocks_used + load.host_blocks_used
            return not (blocks or load.running_requests or load.waiting_requests or self.executor.held)

        await self.until(is_free)


StartRig = Callable[..., Awaitable[Rig]]


def request(text: str = "the", **stopping: Any) -> pb.GenerateRequest:
    """A request whose answer goes on unless told otherwise."""
    stopping.setdefault("max_tokens", 5)
    return pb.GenerateRequest(text=text, stopping=pb.StoppingOptions(**stopping))


def streaming(message: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(request=message)


async def collect(stream: AsyncIterator[pb.GenerateStreamResponse]) -> list[pb.GenerateStreamResponse]:
    return [message async for message in stream]


async def first_delta(stream: Any) -> pb.GenerationDelta:
    async for message in stream:
        if message.HasField("delta"):
            assert isinstance(message.delta, pb.GenerationDelta)
            return message.delta
    raise AssertionError("no delta")


def detail(call: grpc.aio.AioRpcError, kind: type[Any]) -> Any:
    """The one detail of a kind in a status."""
    status = rpc_status.from_call(call)
    assert status is not None
    message = kind()
    [packed] = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    packed.Unpack(message)
    return message


async def refused(awaitable: Any) -> tuple[grpc.StatusCode, str, grpc.aio.AioRpcError]:
    """Code and reason of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code(), detail(caught.value, error_details_pb2.ErrorInfo).reason, caught.value
