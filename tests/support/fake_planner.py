"""A real gRPC server that stands in for the planner: it keeps every request and answers as the test says."""

# ruff: noqa: N802  # gRPC names the methods.

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from neoflex.v1 import inference_pb2 as pb
from neoflex.v1 import inference_pb2_grpc, trace_pb2_grpc
from support.traces import ScriptedTraces
from svc_common.errors import ServiceError
from svc_common.grpc_server import GrpcServer
from svc_common.security.door import Door

Context = grpc.aio.ServicerContext[Any, Any]
MODEL = "tiny"
END, START = 1, 2
_SPECIAL = {END: "<|end|>", START: "<|start|>"}
_FIRST_BYTE = 0x20_0000
"""Beyond all characters: tokens of one byte each."""


def byte_token(value: int) -> int:
    return _FIRST_BYTE + value


def token_text(token_id: int) -> bytes:
    """A character's token is its number."""
    if token_id in _SPECIAL:
        return b""
    return bytes([token_id - _FIRST_BYTE]) if token_id >= _FIRST_BYTE else chr(token_id).encode()


def logprob(token_id: int, value: float, *top: tuple[int, float]) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token_id=token_id, logprob=value),
        top=[pb.TokenLogprob(token_id=other, logprob=other_value) for other, other_value in top],
    )


@dataclass
class Answer:
    """What is generated, piece by piece."""

    pieces: Iterable[str] = ("Hel", "lo")
    finish: pb.Finish = field(default_factory=lambda: pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=END))
    logprobs: Callable[[int], pb.PositionLogprobs] = lambda token: logprob(token, -0.5)
    prompt_logprobs: tuple[pb.PositionLogprobs, ...] = ()
    cached_tokens: int = 0
    refusal: ServiceError | None = None
    """In place of an answer."""
    failure: ServiceError | None = None
    """After all pieces."""
    hold: asyncio.Event | None = None
    """Waited for after the first piece."""


class FakePlanner(inference_pb2_grpc.InferenceServiceServicer):
    """Prompts are 5 tokens long, whatever they are."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.tokenized: list[pb.TokenizeRequest] = []
        self.detokenized: list[list[int]] = []
        self.answer = Answer()
        self.answers: list[Answer] = []
        """Of the next requests; then `answer`."""
        self.info = pb.GetModelInfoResponse(
            name=MODEL, vocabulary_size=_FIRST_BYTE + 256, context_tokens=2048, eos_token_ids=[END]
        )
        self.model_refusal: ServiceError | None = None
        self.load = pb.GetLoadResponse()
        self.server_info = pb.GetServerInfoResponse()
        self.traces = ScriptedTraces()
        self.running = 0
        self.cancelled = asyncio.Semaphore(0)
        self._changed = asyncio.Event()

    async def until_running(self, number: int) -> None:
        """Returns when so many requests run."""
        async with asyncio.timeout(60):
            while self.running != number:
                self._changed.clear()
                await self._changed.wait()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        response = pb.GenerateResponse(request_id=request.request_id)
        async for message in self._messages(request, context):
            response.text += message.delta.text
            response.token_ids.extend(message.delta.token_ids)
            response.logprobs.extend(message.delta.logprobs)
            response.prompt_logprobs.extend(message.delta.prompt_logprobs)
            if message.HasField("finished"):
                response.finish.CopyFrom(message.finished.finish)
                response.usage.CopyFrom(message.finished.usage)
        return response

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async for message in self._messages(request.request, context):
            yield message

    async def _messages(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        kept = pb.GenerateRequest()
        kept.CopyFrom(request)
        self.requests.append(kept)
        self.metadata.append({str(key): str(value) for key, value in context.invocation_metadata() or ()})
        answer = self.answers.pop(0) if self.answers else self.answer
        if answer.refusal:
            raise answer.refusal
        self.running += 1
        self._changed.set()
        try:
            async for message in _answered(answer, request):
                yield message
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.release()
            raise
        finally:
            self.running -= 1
            self._changed.set()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self.tokenized.append(request)
        text = request.text or "".join(turn.content for turn in request.chat.messages)
        return pb.TokenizeResponse(token_ids=[START, *map(ord, text)])

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        self.detokenized.append(list(request.token_ids))
        tokens = [pb.TokenText(text=token_text(item), special=_SPECIAL.get(item, "")) for item in request.token_ids]
        text = b"".join(map(token_text, request.token_ids)).decode(errors="replace")
        return pb.DetokenizeResponse(text=text, tokens=tokens if request.with_tokens else ())

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        if self.model_refusal:
            raise self.model_refusal
        return self.info

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return self.server_info

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return self.load


async def _answered(answer: Answer, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateStreamResponse]:
    started = pb.GenerationStarted(request_id=request.request_id, prompt_tokens=5)
    yield pb.GenerateStreamResponse(started=started)
    pieces = list(answer.pieces)
    ids = [list(map(ord, piece)) for piece in pieces]
    if answer.finish.WhichOneof("matched") == "stop_token_id":
        pieces.append("")
        ids.append([answer.finish.stop_token_id])
    for number, (piece, token_ids) in enumerate(zip(pieces, ids, strict=True)):
        delta = pb.GenerationDelta(text=piece, token_ids=token_ids)
        if request.output.HasField("logprobs"):
            delta.logprobs.extend(map(answer.logprobs, token_ids))
        if request.output.HasField("prompt_logprobs") and number == 0:
            delta.prompt_logprobs.extend(answer.prompt_logprobs)
        yield pb.GenerateStreamResponse(delta=delta)
        if number == 0 and answer.hold:
            await answer.hold.wait()
    if answer.failure:
        raise answer.failure
    usage = pb.Usage(
        prompt_tokens=5,
        completion_tokens=sum(map(len, ids)),
        time_to_first_token_ns=30_000_000,
        duration_ns=130_000_000,
        cached_tokens=answer.cached_tokens,
    )
    yield pb.GenerateStreamResponse(finished=pb.GenerationFinished(finish=answer.finish, usage=usage))


@dataclass(frozen=True)
class RunningPlanner:
    fake: FakePlanner
    server: GrpcServer

    @property
    def address(self) -> str:
        return self.server.address


@asynccontextmanager
async def fake_planner(listen: str = "127.0.0.1:0", door: Door | None = None) -> AsyncIterator[RunningPlanner]:
    """Ready to serve, within the running event loop."""
    fake = FakePlanner()
    server = GrpcServer(listen, ["neoflex.v1.InferenceService"], door)
    server.register(inference_pb2_grpc.add_InferenceServiceServicer_to_server, fake)
    server.register(trace_pb2_grpc.add_TraceServiceServicer_to_server, fake.traces)
    await server.start()
    await server.set_ready(True)
    try:
        yield RunningPlanner(fake, server)
    finally:
        await server.stop(0)
