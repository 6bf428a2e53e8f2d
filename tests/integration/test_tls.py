"""The real services with mutual TLS on every hop and keys at both doors: the reference's tokens, and nobody else."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import grpc
import httpx2
import pytest
from openai import DefaultHttpxClient, OpenAI
from support.certificates import Authority, Issued
from support.reference import Reference, Verdict

from neoflex import AsyncClient, Client, NeoflexError, Tls
from neoflex.supervisor import LocalStack
from neoflex.v1 import cpu_attention_pb2, cpu_attention_pb2_grpc, executor_pb2, executor_pb2_grpc
from svc_common.model.tokenizer import Tokenizer

NUM_TOKENS = 24
KEY = "an-api-key"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> Issued:
    return authority.issue("client")


@pytest.fixture(scope="module")
def stack(authority, tmp_path_factory, start_module) -> LocalStack:
    """Every service on TCP; all KV on the host, so that each hop carries its part of each token."""
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    door = {"listen": "127.0.0.1:0", "api_keys_file": str(keys), "client_certificates": True}
    return start_module(
        tls=authority.issue("services", "localhost", "127.0.0.1").section,
        planner=door,
        gateway=door,
        gpu={"listen": free_address(), "kv_bytes": 0},
        cpu_attn={"listen": free_address(), "kv_bytes": "128MiB"},
    )


def tls_of(issued: Issued) -> Tls:
    return Tls(issued.ca, issued.certificate, issued.key)


def test_tokens_equal_transformers(stack: LocalStack, own: Issued, reference: Reference, prompts) -> None:
    async def run(chosen: list[list[int]]) -> list[Sequence[int]]:
        async with AsyncClient(stack.address, tls=tls_of(own), api_key=KEY) as client:
            calls = [
                client.generate(token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=300)
                for prompt in chosen
            ]
            return [answer.token_ids for answer in await asyncio.gather(*calls)]

    chosen, verdict = prompts[:4], Verdict()
    for number, (prompt, tokens) in enumerate(zip(chosen, asyncio.run(run(chosen)), strict=True)):
        assert len(tokens) == NUM_TOKENS
        reference.judge(prompt, tokens, verdict, f"request {number}")
    assert verdict.mismatches == []
    assert stack.server_info().counters.cpu_attended_tokens > 0


def test_openais_client_by_https(
    stack: LocalStack, own: Issued, reference: Reference, tokenizer: Tokenizer, prompts
) -> None:
    with DefaultHttpxClient(verify=tls_of(own).ssl_context()) as http:
        client = OpenAI(base_url=f"{stack.http_url}/v1", api_key=KEY, http_client=http)
        answer = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=prompts[0],
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].text == tokenizer.decode(reference.greedy(prompts[0], 8))


def test_nobody_else_gets_in_anywhere(stack: LocalStack, authority: Authority, own: Issued, tmp_path: Path) -> None:
    theirs = Authority(tmp_path / "theirs").issue("client")
    late = authority.issue("late", expired=True)
    config = stack.config
    calls = {
        config.gpu.listen: (executor_pb2_grpc.ExecutorServiceStub, executor_pb2.GetExecutorStatusRequest()),
        config.cpu_attn[0].listen: (
            cpu_attention_pb2_grpc.CpuAttentionServiceStub,
            cpu_attention_pb2.SetThreadsRequest(num_threads=1),
        ),
    }
    for address, (make_stub, request) in calls.items():
        for wrong in (None, theirs, late):
            pair = (wrong.key.read_bytes(), wrong.certificate.read_bytes()) if wrong else ()
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)
            with grpc.secure_channel(address, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
                _ask(make_stub(channel), request)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            _ask(make_stub(channel), request)
    for tls, key in ((tls_of(own), ""), (tls_of(own), "wrong"), (Tls(authority.ca), KEY), (False, KEY)):
        with Client(stack.address, tls=tls, api_key=key) as client, pytest.raises(NeoflexError) as refusal:
            client.generate("hello", max_tokens=1)
        assert refusal.value.code == ("UNAUTHENTICATED" if tls == tls_of(own) else "UNAVAILABLE")
    for tls in (Tls(authority.ca), Tls(authority.ca, theirs.certificate, theirs.key)):
        with httpx2.Client(verify=tls.ssl_context()) as http, pytest.raises(httpx2.HTTPError):
            http.get(f"{stack.http_url}/v1/models", headers={"authorization": f"Bearer {KEY}"})
    with httpx2.Client(verify=tls_of(own).ssl_context()) as http:
        assert http.get(f"{stack.http_url}/v1/models").status_code == 401


def _ask(stub: object, request: object) -> None:
    name = type(request).__name__.removesuffix("Request")
    getattr(stub, name)(request, timeout=20)


def test_tls_at_the_doors_and_sockets_behind(authority, own, start, reference, prompts) -> None:
    """As `neoflex up` has it by default: certificate and key are enough, the inner services are on Unix sockets."""
    issued = authority.issue("door", "llm.example.com", "127.0.0.1")
    stack = start(
        tls={"certificate": str(issued.certificate), "key": str(issued.key)},
        gateway={"listen": "127.0.0.1:0"},
        cpu_attn={"kv_bytes": 0},
    )
    assert stack.config.gpu.listen.startswith("unix:")
    with Client(stack.address, tls=Tls(authority.ca)) as client:
        answer = client.generate(token_ids=prompts[0], max_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == reference.greedy(prompts[0], 8)
    with httpx2.Client(verify=Tls(authority.ca).ssl_context()) as http:
        body = {"prompt": prompts[0], "max_tokens": 1}
        assert http.post(f"{stack.http_url}/v1/completions", json=body).status_code == 200
    with Client(stack.address, tls=False) as client, pytest.raises(NeoflexError):
        client.generate("hello", max_tokens=1)
