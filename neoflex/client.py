"""The blocking client: a thin face over the generated stub. `aio.py` is its asyncio twin."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neoflex import errors, wire
from neoflex.access import Access, Tls
from neoflex.channel import (
    ALIVE_REQUEST,
    DEFAULT_ADDRESS,
    READY_POLL_S,
    READY_REQUEST,
    check_timeout_s,
    is_serving,
)
from neoflex.errors import NeoflexError
from neoflex.generation import Completion, Delta, Finish, GenerateOptions, Message, Usage
from neoflex.retries import DEFAULT_RETRIES, Deadline
from neoflex.types import Load, ModelInfo, ServerInfo
from neoflex.v1 import inference_pb2 as pb
from neoflex.v1.inference_pb2_grpc import InferenceServiceStub
from svc_common.security.handshake import Greeting, handshake_trouble


class Client:
    """Calls a NeoFlex server at `host:port` or `unix:path`. Safe to share between threads.

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
        self._channel = access.channel(address)
        self._stub = InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        access.bring_key(self._stub)
        self._greeting = access.greeting
        self._trouble = ""
        """With TLS, when the server was last asked how it is."""
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generates a whole answer. The prompt is a text, or one of the options `token_ids` and `messages`."""
        request = wire.generate_request(prompt, options)
        deadline = Deadline(timeout)
        for num_left in range(self.max_retries, -1, -1):
            try:
                with self._errors(timeout):
                    return wire.completion(self._stub.Generate(request, timeout=deadline.left_s))
            except NeoflexError as error:
                time.sleep(deadline.retry_delay_s(error, num_left))
        raise AssertionError("the last try returns or raises")

    def stream(
        self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "Stream":
        """Generates an answer piece by piece; arguments as for `generate`. Closing the stream ends the request."""
        request = wire.generate_request(prompt, options)
        message = pb.GenerateStreamRequest(request=request)
        return Stream(
            lambda left_s: self._stub.GenerateStream(message, timeout=left_s),
            request.request_id,
            self.address,
            self._greeting,
            timeout,
            self.max_retries,
        )

    def abort(self, *request_ids: str) -> tuple[str, ...]:
        """Ends running requests; returns the ids that were running."""
        with self._errors():
            return tuple(self._stub.Abort(pb.AbortRequest(request_ids=request_ids)).aborted_request_ids)

    def tokenize(
        self, text: str | None = None, *, messages: Sequence[Message | Mapping[str, str]] | None = None
    ) -> tuple[int, ...]:
        """The token ids that a request with this prompt begins with."""
        request = wire.tokenize_request(text, messages)
        with self._errors():
            return tuple(self._stub.Tokenize(request).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        with self._errors():
            return str(self._stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids)).text)

    def model_info(self) -> ModelInfo:
        with self._errors():
            return wire.model_info(self._stub.GetModelInfo(pb.GetModelInfoRequest()))

    def server_info(self) -> ServerInfo:
        with self._errors():
            return wire.server_info(self._stub.GetServerInfo(pb.GetServerInfoRequest()))

    def load(self) -> Load:
        """What waits and runs, and what both tiers hold, at this moment."""
        with self._errors():
            return wire.load(self._stub.GetLoad(pb.GetLoadRequest()))

    def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether requests are answered now; False where nobody listens, or the server drains."""
        return self._is_serving(READY_REQUEST, timeout)

    def is_alive(self, timeout: float = 1.0) -> bool:
        """Whether requests in hand get ahead; False where nobody listens."""
        return self._is_serving(ALIVE_REQUEST, timeout)

    def _is_serving(self, request: health_pb2.HealthCheckRequest, timeout: float) -> bool:
        try:
            return is_serving(self._health.Check(request, timeout=timeout))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._trouble = handshake_trouble(error.details() or "", self.address, self._greeting)
            return False

    def wait_until_ready(self, timeout: float) -> None:
        """Returns once requests are answered. Raises DeadlineExceededError when `timeout` seconds are over."""
        deadline = time.monotonic() + timeout
        while not self.is_ready(check_timeout_s(deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise errors.not_ready(self.address, timeout, self._trouble)
            time.sleep(READY_POLL_S)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _errors(self, timeout_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        return _typed_errors(self.address, timeout_s, self._greeting)


class Stream:
    """An answer in pieces: iterate over Deltas; `finish` and `usage` are there at the end.

    Leave it early by `close` or as a context manager: the server then ends the request and frees its blocks.
    """

    def __init__(
        self,
        open_call: "Callable[[float | None], grpc.CallIterator[pb.GenerateStreamResponse]]",
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
        self._responses = iter(self._call)
        self._address = address
        self._greeting = greeting
        self._timeout_s = timeout_s
        self._closed = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._closed:
            try:
                response = next(self._responses)
            except StopIteration:
                self._closed = True
                if self.finish is None:
                    raise errors.cut_short(self._address) from None
            except grpc.RpcError as error:
                if self._closed:  # Closed by another thread while this one waited.
                    break
                self._try_again(errors.from_call(error, self._address, self._timeout_s, self._greeting))
            else:
                match response.WhichOneof("event"):
                    case "started":
                        self.prompt_tokens = response.started.prompt_tokens
                    case "delta":
                        return wire.delta(response.delta)
                    case "finished":
                        self.finish = wire.finish(response.finished.finish)
                        self.usage = wire.usage(response.finished.usage)
        raise StopIteration

    def _try_again(self, error: NeoflexError) -> None:
        """Waits and asks once more. Raises `error` where that is of no use."""
        num_left = 0 if self.prompt_tokens is not None else self._num_retries_left
        try:
            time.sleep(self._deadline.retry_delay_s(error, num_left))
        except NeoflexError:
            self._closed = True
            raise
        self._num_retries_left -= 1
        if not self._closed:
            self._call = self._open_call(self._deadline.left_s)
            self._responses = iter(self._call)

    def close(self) -> None:
        """Ends the request if it still runs. Harmless otherwise."""
        self._closed = True
        self._call.cancel()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def _typed_errors(address: str, timeout_s: float | None, greeting: Greeting) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise errors.from_call(error, address, timeout_s, greeting) from error
