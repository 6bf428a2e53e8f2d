"""The public face: checks a call's message, hands it to the engine, and turns what comes back into messages."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from neoflex.v1 import inference_pb2 as pb
from neoflex.v1 import inference_pb2_grpc
from planner_svc import messages, requests
from planner_svc.access_log import AccessLog
from planner_svc.classes import ServiceClasses
from planner_svc.engine import Engine
from planner_svc.executor_client import Placement
from planner_svc.generation import Generation, GenerationRequest
from planner_svc.grammar_door import GrammarDoor
from planner_svc.request_meters import RequestMeters
from planner_svc.request_span import RequestSpan
from planner_svc.requests import (
    MAX_REQUEST_ID_CHARACTERS,
    ChatPrompt,
    GenerationOptions,
    Limits,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from svc_common.errors import ServiceError, invalid_argument
from svc_common.logs import log_about
from svc_common.model.chat_template import ChatTemplateError, ToolsUnknownError, Turn
from svc_common.model.no_tokenizer import NO_TOKENIZER
from svc_common.model.spec import ModelSpec
from svc_common.model.tokenizer import Tokenizer

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model, and the server it runs in, as callers are told."""

    name: str
    spec: ModelSpec
    tokenizer: Tokenizer
    limits: Limits
    eos_token_ids: tuple[int, ...]
    block_tokens: int
    version: str


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """One coroutine per call. A call that ends, however, takes its request out of the engine."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        classes: ServiceClasses,
        placement: Callable[[], Placement | None],
        grammars: GrammarDoor,
        access: AccessLog,
        meters: RequestMeters,
        host_addresses: tuple[str, ...],
    ) -> None:
        """`placement` returns that of the current epoch, None before the first. `host_addresses`: of the CPU attention
        services."""
        self._model = model
        self._engine = engine
        self._classes = classes
        self._placement = placement
        self._grammars = grammars
        self._access = access
        self._host_addresses = host_addresses
        self._num_open = 0
        self.idle = asyncio.Event()
        """Set while no accepted request's call is open: what it was answered has left."""
        self.idle.set()
        self._meters = meters
        self._started_s = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        generation = await self._accept(request, context)
        whole = await generation.whole()
        return pb.GenerateResponse(
            request_id=generation.request.request_id,
            text=whole.text,
            token_ids=whole.token_ids,
            logprobs=messages.position_messages(whole.positions),
            finish=messages.finish_message(generation.finished),
            usage=messages.usage_message(generation.finished),
            prompt_logprobs=messages.position_messages(whole.prompt_positions),
        )

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        generation = await self._accept(request.request, context)
        yield pb.GenerateStreamResponse(
            started=pb.GenerationStarted(
                request_id=generation.request.request_id, prompt_tokens=len(generation.request.prompt)
            )
        )
        async for delta in generation.deltas():
            yield pb.GenerateStreamResponse(delta=messages.delta_message(delta))
        yield pb.GenerateStreamResponse(
            finished=pb.GenerationFinished(
                finish=messages.finish_message(generation.finished), usage=messages.usage_message(generation.finished)
            )
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(aborted_request_ids=self._engine.in_hand.abort(requests.parse_abort(request)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        prompt = requests.parse_tokenize(request, self._model.limits)
        return pb.TokenizeResponse(token_ids=await self._tokens_of(prompt, prefix=""))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        token_ids = requests.parse_detokenize(request, self._model.limits)
        tokenizer = self._model.tokenizer
        return pb.DetokenizeResponse(
            text=await asyncio.to_thread(tokenizer.decode, token_ids),
            tokens=[messages.token_message(tokenizer, token_id) for token_id in token_ids]
            if request.with_tokens
            else (),
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        placement = self._placement()
        if placement is None:
            raise self._engine.availability.closed()
        spec = self._model.spec
        return pb.GetModelInfoResponse(
            name=self._model.name,
            architecture=spec.architecture,
            vocabulary_size=spec.vocab_size,
            context_tokens=self._model.limits.max_sequence_tokens,
            eos_token_ids=self._model.eos_token_ids,
            num_parameters=spec.num_parameters,
            compute_dtype=placement.compute_dtype,
            kv_dtype=placement.kv_dtype,
            host_kv_dtype=placement.host_kv_dtype,
            tool_call_format=messages.tool_call_format_value(self._model.tokenizer.tool_call_format),
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        response = pb.GetServerInfoResponse(
            version=self._model.version,
            uptime_s=time.monotonic() - self._started_s,
            block_tokens=self._model.block_tokens,
            counters=messages.counters_message(self._engine.counters, self._engine.scheduler_counters()),
            service_classes=messages.class_messages(self._classes, self._engine.classes.counters),
            not_ready=self._engine.why_not_ready(),
            cpu_attention_addresses=self._host_addresses,
        )
        if factors := self._engine.calibration_factors():
            response.calibration.CopyFrom(messages.calibration_message(factors))
        if placement := self._placement():
            response.device = placement.device
            response.block_bytes = placement.block_bytes
            response.host_block_bytes = placement.host_block_bytes
            response.gpu_blocks = placement.gpu_blocks
            response.host_pools.extend(messages.pool_messages(placement))
            response.memory_use.CopyFrom(messages.memory_message(placement))
            response.host_blocks = sum(pool.num_blocks for pool in response.host_pools)
            response.cpu_attention_threads = sum(pool.num_threads for pool in response.host_pools)
            response.cpu_attention_min_threads = sum(pool.min_threads for pool in response.host_pools)
            response.cpu_attention_max_threads = sum(pool.max_threads for pool in response.host_pools)
        return response

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return messages.load_message(self._engine.load())

    async def _accept(self, message: pb.GenerateRequest, context: Context) -> Generation:
        """Checks, tokenizes and submits a request. Raises ServiceError."""
        arrival_ns = time.monotonic_ns()
        operation = "chat" if message.HasField("chat") else "text_completion"
        span = self._meters.begin(operation, context.invocation_metadata(), arrival_ns)
        span.enter()
        try:
            prompt, options = requests.parse_generation(message, self._model.limits, self._classes)
            self._engine.check_open(options.request_id)
            tokens = await self._tokens_of(prompt, prefix="request.")
            grammar = await self._grammars.make_ready(options.constraint) if options.constraint else ""
            request = self._resolve(prompt, tokens, options, grammar, arrival_ns, span)
            generation = self._engine.submit(request, f"request.{requests.prompt_field(prompt)}")
        except ServiceError as error:
            self._engine.counters.refused_requests += 1
            self._access.refused(message.request_id[:MAX_REQUEST_ID_CHARACTERS], _gateway_id(context), error)
            self._meters.refused(span, error.reason, arrival_ns)
            raise
        except BaseException as error:  # Its call was cancelled, say.
            self._meters.refused(span, type(error).__name__, arrival_ns)
            raise
        log_about(request.request_id)
        self._num_open += 1
        self.idle.clear()
        gateway_id = _gateway_id(context)
        context.add_done_callback(lambda _: self._end(generation, gateway_id))  # type: ignore[arg-type]  # stub: a class
        span.accept(request)
        self._note_prompt(span, prompt, tokens)
        return generation

    def _end(self, generation: Generation, gateway_id: str | None) -> None:
        """Cancelled, past its deadline, broken: whichever way the call ended, nobody waits for the rest."""
        self._engine.in_hand.withdraw(generation)
        self._access.ended(generation, gateway_id)
        self._num_open -= 1
        if not self._num_open:
            self.idle.set()

    def _note_prompt(self, span: RequestSpan, prompt: Prompt, tokens: Sequence[int]) -> None:
        if not span.captures_content:
            return
        match prompt:
            case ChatPrompt(turns):
                span.note_prompt(turns)
            case TextPrompt(text):
                span.note_prompt([Turn("user", text)])
            case _:
                span.note_prompt([Turn("user", self._model.tokenizer.decode(tokens))])

    async def _tokens_of(self, prompt: Prompt, prefix: str) -> tuple[int, ...]:
        """Token ids of a prompt; text is tokenized on another thread, so that a long one holds up nobody.

        `prefix` is what stands before the prompt's field in the message.
        """
        tokenizer, field = self._model.tokenizer, prefix + requests.prompt_field(prompt)
        if not (self._model.limits.has_text or isinstance(prompt, TokenPrompt)):
            raise invalid_argument(field, f"{NO_TOKENIZER}: a prompt has to be token ids", "NO_TOKENIZER")
        match prompt:
            case TextPrompt(text):
                tokens = tuple(await asyncio.to_thread(tokenizer.encode, text))
            case ChatPrompt(turns, tools):
                try:
                    tokens = tuple(await asyncio.to_thread(tokenizer.encode_chat, turns, tools))
                except ToolsUnknownError as error:
                    raise invalid_argument(f"{prefix}chat.tools", str(error), "TOOLS_UNKNOWN") from error
                except ChatTemplateError as error:
                    raise invalid_argument(field, str(error), "CHAT_TEMPLATE") from error
            case _:
                return prompt.token_ids
        requests.check_vocabulary(field, tokens, self._model.limits)
        return tokens

    def _resolve(
        self,
        prompt: Prompt,
        tokens: tuple[int, ...],
        options: GenerationOptions,
        grammar: str,
        arrival_ns: int,
        span: RequestSpan,
    ) -> GenerationRequest:
        end_token_ids = options.stop_token_ids
        if not options.ignore_eos:
            end_token_ids |= frozenset(self._model.eos_token_ids)
        return GenerationRequest(
            request_id=options.request_id,
            prompt=tokens,
            sampling=replace(options.sampling, grammar=grammar),
            max_tokens=requests.resolve_max_tokens(
                prompt, len(tokens), options.max_tokens, self._model.limits, self._engine.room_tokens
            ),
            stops=options.stops,
            end_token_ids=end_token_ids,
            time_limit_s=options.time_limit_s,
            arrival_ns=arrival_ns,
            service_class=options.service_class,
            targets=options.targets,
            cache_salt=options.cache_salt,
            span=span,
        )


def _gateway_id(context: Context) -> str | None:
    """How the gateway, or whoever calls like it, knows the request."""
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str):
            return value[:MAX_REQUEST_ID_CHARACTERS]
    return None
