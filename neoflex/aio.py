"""The asyncio client: `client.py` with `await`."""

# ruff: noqa: ASYNC109  # `timeout` is a gRPC deadline, which the server is told.

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2_grpc

from neoflex import errors, wire
from neoflex.access import Access, Tls
from neoflex.channel import DEFAULT_ADDRESS, READY_POLL_S, READY_REQUEST, check_timeout_s, is_serving
from neoflex.errors import NeoflexError
from neoflex.generation import Completion, Delta, Finish, GenerateOptions, Message, Usage
from neoflex.retries import DEFAULT_RETRIES, Deadline
from neoflex.types import Load, ModelInfo, ServerInfo
from neoflex.v1 import inference_pb2 as pb
from neoflex.v1.inference_pb2_grpc import InferenceServiceStub
from svc_common.security.handshake import Greeting, handshake_trouble

if TYPE_CHECKING:  # No generic class when it runs.
    _Call = grpc.aio.UnaryStreamCall[pb.GenerateStreamRequest, pb.GenerateStreamResponse]


class AsyncClient:
    """Calls a NeoFlex server at `host:port` or `unix:path`, within one event loop.

    Every call raises a NeoflexError where the server refuses or fails. `timeout` bounds a whole call, in seconds.
    Where the server is too busy, or not ready, and says when to come back, `generate` and `stream` do so up to
    `max_retries` times; an answer that has begun is never asked for again.
    `tls` and `api_key` show the server who calls; by default the environment says (NEOFLEX_CA_FILE,
    NEOFLEX_CERTIFICATE_FILE, NEOFLEX_KEY_FILE, NEOFLEX_SERVER_NAME, NEOFLEX_TLS and NEOFLEX_API_KEY). False and "" say:
    nothing of that.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: Tls | bool | None = None,
        api_key: str | None = None,
        max_retries: int = DEFAULT_RETRIES,
    ) -> None:
        """Raises AccessError where a file of `tls` can't be used."""
        self.address = address
        self.max_retries = max_retries
        access = Access.of(tls, api_key)
        self._channel = access.aio_channel(address)
        self._stub = InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        access.bring_key(self._stub)
        self._greeting = access.greeting
        self._trouble = ""
        """With TLS, when the server was last asked how it is."""
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def generate(
        self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generates a whole answer. The prompt is a text, or one of the options `token_ids` and `messages`."""
        request = wire.generate_request(prompt, options)
        deadline = Deadline(timeout)
        for num_left in range(self.max_retries, -1, -1):
            try:
                with self._errors(timeout):
                    return wire.completion(await self._stub.Generate(request, timeout=deadline.left_s))
            except NeoflexError as error:
                await asyncio.sleep(deadline.retry_delay_s(error, num_left))
        raise AssertionError("the last try returns or raises")

    def stream(
        self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "AsyncStream":
        """Generates an answer piece by piece; arguments as for `generate`. Closing the stream ends the request."""
        request = wire.generate_request(prompt, options)
        message = pb.GenerateStreamRequest(request=request)
        return AsyncStream(
            lambda left_s: self._stub.GenerateStream(message, timeout=left_s),
            request.request_id,
            self.address,
            self._greeting,
            timeout,
            self.max_retries,
        )

    async def abort(self, *request_ids: str) -> tuple[str, ...]:
        """Ends running requests; returns the ids that were running."""
        with self._errors():
            return tuple((await self._stub.Abort(pb.AbortRequest(request_ids=request_ids))).aborted_request_ids)

    async def tokenize(
        self, text: str | None = None, *, messages: Sequence[Message | Mapping[str, str]] | None = None
    ) -> tuple[int, ...]:
        """The token ids that a request with this prompt begins with."""
        request = wire.tokenize_request(text, messages)
        with self._errors():
            return tuple((await self._stub.Tokenize(request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        with self._errors():
            return str((await self._stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids))).text)

    async def model_info(self) -> ModelInfo:
        with self._errors():
            return wire.model_info(await self._stub.GetModelInfo(pb.GetModelInfoRequest()))

    async def server_info(self) -> ServerInfo:
        with self._errors():
            return wire.server_info(await self._stub.GetServerInfo(pb.GetServerInfoRequest()))

    async def load(self) -> Load:
        """What waits and runs, and what both tiers hold, at this moment."""
        with self._errors():
            return wire.load(await self._stub.GetLoad(pb.GetLoadRequest()))

    async def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether requests are answered now; False where nobody listens."""
        try:
            return is_serving(await self._health.Check(READY_REQUEST, timeout=timeout))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._trouble = handshake_trouble(error.details() or "", self.address, self._greeting)
            return False

    async def wait_until_ready(self, timeout: float) -> None:
        """Returns once requests are answered. Raises DeadlineExceededError when `timeout` seconds are over."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        while not await self.is_ready(check_timeout_s(deadline - clock())):
            if clock() >= deadline:
                raise errors.not_ready(self.address, timeout, self._trouble)
            await asyncio.sleep(READY_POLL_S)

    async def aclose(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    @contextlib.contextmanager
    def _errors(self, timeout_s: float | None = None) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise errors.from_call(error, self.address, timeout_s, self._greeting) from error


class AsyncStream:
    """An answer in pieces: iterate over Deltas; `finish` and `usage` are there at the end.

    Leave it early by `aclose` or as a context manager: the server then ends the request and frees its blocks.
    """

    def __init__(
        self,
        open_call: Callable[[float | None], "_Call"],
        request_id: str,
        address: str,
        greeting: Greeting,
        timeout_s: float | None,
        max_retries: int,
    ) -> None:
        """`open_call` takes the seconds that are left."""
        self.request_id = request_id
        self.prompt_tokens: int | None = None
        """Known from the first piece on."""
        self.finish: Finish | None = None
        self.usage: Usage | None = None
        self._open_call = open_call
        self._deadline = Deadline(timeout_s)
        self._num_retries_left = max_retries
        self._call = open_call(timeout_s)
        self._address = address
        self._greeting = greeting
        self._timeout_s = timeout_s
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._closed:
            try:
                response = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._try_again(errors.from_call(error, self._address, self._timeout_s, self._greeting))
                continue
            except asyncio.CancelledError:
                if self._closed:  # Closed by another task while this one waited.
                    break
                raise
            if isinstance(response, pb.GenerateStreamResponse):
                match response.WhichOneof("event"):
                    case "started":
                        self.prompt_tokens = response.started.prompt_tokens
                    case "delta":
                        return wire.delta(response.delta)
                    case "finished":
                        self.finish = wire.finish(response.finished.finish)
                        self.usage = wire.usage(response.finished.usage)
            else:  # grpc.aio.EOF
                self._closed = True
                if self.finish is None:
                    raise errors.cut_short(self._address)
        raise StopAsyncIteration

    async def _try_again(self, error: NeoflexError) -> None:
        """Waits and asks once more. Raises `error` where that is of no use."""
        num_left = 0 if self.prompt_tokens is not None else self._num_retries_left
        try:
            await asyncio.sleep(self._deadline.retry_delay_s(error, num_left))
        except NeoflexError:
            self._closed = True
            raise
        self._num_retries_left -= 1
        if not self._closed:
            self._call = self._open_call(self._deadline.left_s)

    async def aclose(self) -> None:
        """Ends the request if it still runs. Harmless otherwise."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
