"""The planner as the gateway calls it: one channel, every failure a NeoflexError, and what never changes kept."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from neoflex import errors
from neoflex.channel import CHANNEL_OPTIONS, READY_REQUEST, is_serving
from neoflex.errors import NeoflexError
from neoflex.v1 import executor_pb2, trace_pb2
from neoflex.v1 import inference_pb2 as pb
from neoflex.v1.inference_pb2_grpc import InferenceServiceStub
from neoflex.v1.trace_pb2_grpc import TraceServiceStub
from svc_common.security.handshake import SERVICE, Greeting
from svc_common.security.tls import TlsFiles
from svc_common.service_link import ServiceLink

Metadata = tuple[tuple[str, str], ...]
TraceCall = grpc.aio.UnaryStreamCall[trace_pb2.TraceIterationsRequest, trace_pb2.TraceIterationsResponse]
StreamCall = grpc.aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]
_CHECK_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class Model:
    """What the gateway has to know of the model."""

    name: str
    context_tokens: int
    end_token_ids: frozenset[int]
    tool_call_format: int
    """One of pb.ToolCallFormat."""


class _Stubs:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.inference = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self.tracing = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
        self.health = health_pb2_grpc.HealthStub(channel)


class Planner:
    """Used within one event loop. What it keeps is dropped when the planner is lost, as another model may be back."""

    def __init__(self, address: str, tls: TlsFiles | None = None, api_key: str | None = None) -> None:
        """Raises ConfigError where the certificate is of no use for calls."""
        self.address = address
        has_tls = tls is not None
        self._greeting = Greeting(has_tls, has_tls, SERVICE)
        self._said = ""
        """What was said last of a planner that can't be reached."""
        self._link = ServiceLink(address, _Stubs, tls, CHANNEL_OPTIONS)
        self._metadata: Metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._trace_calls: set[TraceCall] = set()
        self.is_closing = False
        self._model: Model | None = None
        self._tokens: dict[int, pb.TokenText] = {}

    @property
    def _stub(self) -> "InferenceServiceStub":
        return self._link.stub.inference

    async def model(self) -> Model:
        if self._model is None:
            info: pb.GetModelInfoResponse = await self._call(
                self._stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
            )
            end = frozenset(info.eos_token_ids)
            self._model = Model(info.name, info.context_tokens, end, info.tool_call_format)
        return self._model

    async def generate(self, request: pb.GenerateRequest, metadata: Metadata) -> pb.GenerateResponse:
        """A whole answer. Being cancelled ends the request."""
        return await self._call(self._stub.Generate(request, metadata=(*metadata, *self._metadata)))

    def stream(self, request: pb.GenerateRequest, metadata: Metadata) -> StreamCall:
        """Read it within `failures`."""
        message = pb.GenerateStreamRequest(request=request)
        call: StreamCall = self._stub.GenerateStream(message, metadata=(*metadata, *self._metadata))
        return call

    async def tokenize(self, request: pb.TokenizeRequest) -> list[int]:
        response: pb.TokenizeResponse = await self._call(self._stub.Tokenize(request, metadata=self._metadata))
        return list(response.token_ids)

    async def detokenize(self, token_ids: Iterable[int]) -> str:
        response: pb.DetokenizeResponse = await self._call(
            self._stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids), metadata=self._metadata)
        )
        return response.text

    async def tokens(self, token_ids: Iterable[int]) -> Mapping[int, pb.TokenText]:
        """At least these, by id. Asks for those only that were never asked for before."""
        if missing := sorted(set(token_ids) - self._tokens.keys()):
            request = pb.DetokenizeRequest(token_ids=missing, with_tokens=True)
            response: pb.DetokenizeResponse = await self._call(self._stub.Detokenize(request, metadata=self._metadata))
            self._tokens.update(zip(missing, response.tokens, strict=True))
        return self._tokens

    async def server_info(self) -> pb.GetServerInfoResponse:
        request = pb.GetServerInfoRequest()
        return await self._call(self._stub.GetServerInfo(request, timeout=_CHECK_TIMEOUT_S, metadata=self._metadata))

    async def load(self) -> pb.GetLoadResponse:
        request = pb.GetLoadRequest()
        return await self._call(self._stub.GetLoad(request, timeout=_CHECK_TIMEOUT_S, metadata=self._metadata))

    async def is_ready(self) -> bool:
        """Whether requests are answered now; False where nobody listens."""
        try:
            answer = await self._link.stub.health.Check(READY_REQUEST, timeout=_CHECK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._say(errors.from_call(error, self.address, _CHECK_TIMEOUT_S, self._greeting))
            return False
        self._said = ""
        return is_serving(answer)

    async def is_there(self) -> bool:
        """Whether the process lives: it answers, ready or not, or does not get round to it."""
        try:
            await self._link.stub.health.Check(READY_REQUEST, timeout=_CHECK_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return True

    async def iterations(self, seconds: float) -> AsyncGenerator[executor_pb2.IterationTrace, None]:
        """Those that run in the next `seconds`, traced for as long as this is not closed. Raises NeoflexError."""
        call: TraceCall = self._link.stub.tracing.TraceIterations(
            trace_pb2.TraceIterationsRequest(), timeout=seconds, metadata=self._metadata
        )
        self._trace_calls.add(call)
        try:
            with self.failures():
                while isinstance(response := await call.read(), trace_pb2.TraceIterationsResponse):
                    yield response.trace
        except NeoflexError as error:
            if error.code != "DEADLINE_EXCEEDED":  # Its own end.
                raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.is_closing or (task and task.cancelling()):
                raise
            # Only the call was cancelled, by `end_iterations`.
        finally:
            call.cancel()
            self._trace_calls.discard(call)

    def end_iterations(self) -> None:
        """Nobody has iterations traced any more: who watches would hold up the gateway's end."""
        self.is_closing = True
        for call in self._trace_calls:
            call.cancel()

    async def close(self) -> None:
        await self._link.close()

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raises NeoflexError for a failed call."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._model = None
                self._tokens = {}
            failure = errors.from_call(error, self.address, greeting=self._greeting)
            self._say(failure)
            raise failure from error

    def _say(self, error: NeoflexError) -> None:
        """Once, however often it is tried, where it is the connection that fails."""
        if error.code == "UNAVAILABLE" and not error.reason and error.message != self._said:
            self._said = error.message
            logger.warning("%s", error.message)

    async def _call(self, call: Awaitable[_Response]) -> _Response:
        with self.failures():
            return await call
