"""Where requests go: a NeoFlex server over gRPC, or any server with OpenAI's completions over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

import httpx2

from neoflex.access import Access, Tls
from neoflex.aio import AsyncClient
from neoflex.bench.record import Outcome, Record
from neoflex.errors import NeoflexError, ResourceExhaustedError
from neoflex.generation import GenerateOptions
from svc_common.workloads import Arrival

_FEW_TOKENS = 10_000
"""Ids below this are in the vocabulary of any model that is served today."""
_CONNECT_S = 10.0
_TOO_MANY_REQUESTS = 429


class TargetError(Exception):
    """The server can't be measured; the text says why."""


class Target(Protocol):
    vocabulary_size: int
    """Prompts are made of ids below it."""

    async def run(self, prompt: list[int], arrival: Arrival, record: Record) -> None:
        """Sends one request and notes in `record` what becomes of it. Never raises for what the server does."""
        ...

    async def aclose(self) -> None: ...


class GrpcTarget:
    """A NeoFlex server."""

    vocabulary_size = _FEW_TOKENS

    def __init__(self, address: str, service_class: str | None, access: Access | None = None) -> None:
        access = access or Access()
        # A refusal is what is counted.
        self._client = AsyncClient(address, tls=access.tls or False, api_key=access.api_key or "", max_retries=0)
        self._service_class = service_class

    async def connect(self) -> None:
        """Raises NeoflexError where nobody answers."""
        self.vocabulary_size = (await self._client.model_info()).vocabulary_size

    async def run(self, prompt: list[int], arrival: Arrival, record: Record) -> None:
        clock = asyncio.get_running_loop().time
        options = GenerateOptions(token_ids=prompt, max_tokens=arrival.output_tokens, ignore_eos=True, temperature=1.0)
        if service_class := arrival.class_name or self._service_class:
            options["service_class"] = service_class
        stream = self._client.stream(**options)
        try:
            async with stream:
                async for delta in stream:
                    if delta.token_ids:
                        record.piece_s.append(clock())
                        record.output_tokens += len(delta.token_ids)
            record.outcome = Outcome.FINISHED
        except ResourceExhaustedError as error:
            record.outcome, record.error = Outcome.REFUSED, error.reason or error.code
        except NeoflexError as error:
            record.error = f"{error.code} {error.reason}".strip()

    async def aclose(self) -> None:
        await self._client.aclose()


class HttpTarget:
    """A server with OpenAI's API at `base_url`, e.g. http://127.0.0.1:8000/v1."""

    vocabulary_size = _FEW_TOKENS

    def __init__(
        self,
        base_url: str,
        model: str | None,
        api_key: str | None,
        service_class: str | None,
        tls: Tls | None = None,
    ) -> None:
        """Raises AccessError."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._service_class = service_class
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
        self._base_url = base_url.rstrip("/")
        self._client = httpx2.AsyncClient(
            headers=headers, limits=limits, timeout=timeout, verify=tls.ssl_context() if tls else True
        )
        self._model = model or ""

    async def connect(self) -> None:
        """Raises TargetError where nobody answers, or not as OpenAI's API does."""
        try:
            answer = await self._client.get(f"{self._base_url}/models")
            answer.raise_for_status()
            self._model = self._model or str(answer.json()["data"][0]["id"])
        except httpx2.InvalidURL as error:
            raise TargetError(f"--http: {self._base_url}: {error}") from error
        except httpx2.HTTPError as error:
            raise TargetError(f"--http: {self._base_url}/models: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise TargetError(f"--http: {self._base_url}/models does not list models") from error

    async def run(self, prompt: list[int], arrival: Arrival, record: Record) -> None:
        service_class = arrival.class_name or self._service_class
        headers = {"x-service-class": service_class} if service_class else {}
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            url = f"{self._base_url}/completions"
            async with self._client.stream("POST", url, json=body, headers=headers) as answer:
                if answer.is_success:
                    await self._take(answer, record)
                    return
                await answer.aread()
                if answer.status_code == _TOO_MANY_REQUESTS:
                    record.outcome = Outcome.REFUSED
                record.error = f"HTTP {answer.status_code}"
        except httpx2.HTTPError as error:
            record.error = type(error).__name__

    async def _take(self, answer: httpx2.Response, record: Record) -> None:
        clock = asyncio.get_running_loop().time
        async for event in _events(answer):
            if "error" in event:
                record.error = str(event["error"].get("code") or event["error"].get("type") or "error")
                return
            if event.get("choices"):
                record.piece_s.append(clock())
            if event.get("usage"):
                record.output_tokens = int(event["usage"]["completion_tokens"])
        if record.piece_s and record.output_tokens:
            record.outcome = Outcome.FINISHED
        else:
            record.error = "no tokens, or no usage"

    async def aclose(self) -> None:
        await self._client.aclose()


async def _events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of a stream, without the last, which is no JSON."""
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)
