"""A real gRPC server with a scripted InferenceService, for tests of what talks to one."""

# ruff: noqa: N802  # gRPC names the methods.

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from neoflex.v1 import inference_pb2 as pb
from neoflex.v1 import inference_pb2_grpc, trace_pb2_grpc
from support.traces import ScriptedTraces
from svc_common.errors import FieldViolation, invalid_arguments, resource_exhausted, unavailable
from svc_common.grpc_server import GrpcServer
from svc_common.security.door import Door

Context = grpc.aio.ServicerContext
TOP = pb.TokenLogprob(token_id=9, logprob=-0.25)
LOGPROBS = pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=7, logprob=-1.5), top=[TOP])
USAGE = pb.Usage(
    prompt_tokens=5,
    completion_tokens=3,
    time_to_first_token_ns=250_000_000,
    duration_ns=1_250_000_000,
    recomputations=1,
)
CHAT = pb.ServiceClass(
    name="chat",
    targets=pb.Targets(ttft=Duration(nanos=500_000_000), tpot=Duration(nanos=50_000_000)),
    priority=5,
    share=2.5,
    refuses_late=True,
    requests_in_time=40,
    requests_late=3,
    requests_refused=1200,
)
FINISH = pb.Finish(reason=pb.FINISH_REASON_STOP, stop="END")


class ScriptedInference(inference_pb2_grpc.InferenceServiceServicer):
    """Behaves as the prompt's text says; keeps the last request and how its last stream ended."""

    def __init__(self) -> None:
        self.last_request: pb.GenerateRequest | None = None
        self.num_refused = 0
        """Of those that said "busy twice"."""
        self.stream_cancelled = threading.Event()
        self.cpu_attention_addresses: tuple[str, ...] = ()

    async def Generate(self, request: pb.GenerateRequest, context: Context[Any, Any]) -> pb.GenerateResponse:
        self._accept(request)
        if request.text == "never":
            await asyncio.Event().wait()
        return pb.GenerateResponse(
            request_id=request.request_id,
            text="a b c",
            token_ids=[7, 8, 9],
            logprobs=_logprobs(request),
            prompt_logprobs=_prompt_logprobs(request),
            finish=FINISH,
            usage=self._usage(),
        )

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context[Any, Any]
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        inner = request.request
        self._accept(inner)
        started = pb.GenerationStarted(request_id=inner.request_id, prompt_tokens=5)
        yield pb.GenerateStreamResponse(started=started)
        # A client may leave as soon as it has read the delta, so the delta's own sending may be what is cancelled.
        try:
            yield pb.GenerateStreamResponse(
                delta=pb.GenerationDelta(
                    text="a ", token_ids=[7], logprobs=_logprobs(inner), prompt_logprobs=_prompt_logprobs(inner)
                )
            )
            if inner.text == "never":
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.stream_cancelled.set()
            raise
        if inner.text == "lost midway":
            raise unavailable("CPU_ATTENTION_LOST", "the CPU attention service was lost", retry_after_s=0.5)
        yield pb.GenerateStreamResponse(delta=pb.GenerationDelta(text="b c", token_ids=[8, 9]))
        if inner.text != "cut short":
            yield pb.GenerateStreamResponse(finished=pb.GenerationFinished(finish=FINISH, usage=self._usage()))

    def _usage(self) -> pb.Usage:
        """With a verdict where the request had targets."""
        usage = pb.Usage()
        usage.CopyFrom(USAGE)
        assert self.last_request is not None
        if self.last_request.HasField("targets"):
            usage.targets_met = self.last_request.targets.ttft.seconds >= 1
        return usage

    def _accept(self, request: pb.GenerateRequest) -> None:
        self.last_request = request
        if request.text == "malformed":
            raise invalid_arguments((FieldViolation("request.sampling.top_p", "must be in (0, 1], is 3"),), "BAD_FIELD")
        if request.text == "busy twice" and self.num_refused < 2:
            self.num_refused += 1
            raise unavailable("LOADING", "the model is being loaded", retry_after_s=0.01)
        if request.text == "too many":
            raise resource_exhausted("QUEUE_FULL", "the queue is full", "planner.max_waiting_requests", 1.5)

    async def Abort(self, request: pb.AbortRequest, context: Context[Any, Any]) -> pb.AbortResponse:
        return pb.AbortResponse(aborted_request_ids=[name for name in request.request_ids if name != "unknown"])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context[Any, Any]) -> pb.TokenizeResponse:
        text = request.text or "".join(f"<{item.role}>{item.content}" for item in request.chat.messages)
        return pb.TokenizeResponse(token_ids=[ord(letter) for letter in text])

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context[Any, Any]) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context[Any, Any]
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            name="tiny",
            architecture="llama",
            vocabulary_size=100,
            context_tokens=2048,
            eos_token_ids=[2, 3],
            num_parameters=135_000_000,
            compute_dtype="fp32",
            kv_dtype="fp16",
            host_kv_dtype="int8",
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context[Any, Any]
    ) -> pb.GetServerInfoResponse:
        counters = pb.ServerCounters(
            gpu_only_iterations=40,
            asymmetric_iterations=2,
            same_layer_iterations=7,
            decoupled_iterations=5,
            cpu_attended_tokens=1234,
            cpu_threads_grown=3,
            cpu_threads_shrunk=2,
        )
        return pb.GetServerInfoResponse(
            version="0.1.0",
            uptime_s=12.5,
            device="cpu",
            block_tokens=16,
            block_bytes=2**20,
            host_block_bytes=2**19,
            gpu_blocks=64,
            host_blocks=128,
            cpu_attention_threads=2,
            cpu_attention_min_threads=1,
            cpu_attention_max_threads=4,
            counters=counters,
            cpu_attention_addresses=self.cpu_attention_addresses,
            host_pools=[
                pb.HostPoolInfo(num_blocks=128, num_threads=2, min_threads=1, max_threads=4),
                pb.HostPoolInfo(error="nothing answers at unix:/x"),
            ],
            service_classes=[CHAT, pb.ServiceClass(name="default", is_default=True, share=1)],
            calibration=pb.CalibrationFactors(
                weights=1.25,
                tokens=0.75,
                prefill=1.5,
                gpu_decode=0.5,
                overhead=3,
                contention=0.125,
                cpu_decode=2,
                head=1.75,
                swap=0.25,
            ),
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context[Any, Any]) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(
            waiting_requests=1,
            running_requests=2,
            max_waiting_requests=1024,
            gpu_blocks_used=3,
            gpu_blocks_total=64,
            host_blocks_used=5,
            host_blocks_total=128,
            host_pool_blocks_used=[5, 0],
            classes=[
                pb.ClassLoad(name="chat", running_requests=2),
                pb.ClassLoad(name="default", waiting_requests=1),
            ],
        )


def _logprobs(request: pb.GenerateRequest) -> list[pb.PositionLogprobs]:
    return [LOGPROBS] if request.output.HasField("logprobs") else []


def _prompt_logprobs(request: pb.GenerateRequest) -> list[pb.PositionLogprobs]:
    return [LOGPROBS] * 2 if request.output.HasField("prompt_logprobs") else []


class InferenceServer:
    """The server in its own thread and event loop, so that blocking and asyncio clients can be tested alike."""

    def __init__(
        self,
        servicer: ScriptedInference,
        traces: ScriptedTraces,
        loop: asyncio.AbstractEventLoop,
        server: GrpcServer,
    ) -> None:
        self.servicer = servicer
        self.traces = traces
        self.address = server.address
        self._loop = loop
        self._server = server

    def set_ready(self, ready: bool) -> None:
        self.run(self._server.set_ready(ready))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)


@contextmanager
def inference_server(listen: str = "127.0.0.1:0", door: Door | None = None) -> Iterator[InferenceServer]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servicer, traces = ScriptedInference(), ScriptedTraces()

    async def start() -> GrpcServer:
        server = GrpcServer(listen, ["neoflex.v1.InferenceService"], door)
        server.register(inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer)
        server.register(trace_pb2_grpc.add_TraceServiceServicer_to_server, traces)
        await server.start()
        await server.set_ready(True)
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield InferenceServer(servicer, traces, loop, server)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
