"""Keys, ids, headers, limits and the small routes."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, AuthenticationError
from prometheus_client.parser import text_string_to_metric_families
from support.fake_planner import FakePlanner, RunningPlanner

from gateway_svc.keys import ApiKeys, KeysError

HI: Any = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


async def test_models(openai: AsyncOpenAI) -> None:
    [model] = (await openai.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "neoflex")
    assert (await openai.models.retrieve("tiny")).id == "tiny"


async def test_tokenize_and_detokenize(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    response = await http.post("/tokenize", json={"model": "tiny", "prompt": "Hé"})
    assert response.json() == {"count": 3, "max_model_len": 2048, "tokens": [2, 72, 0xE9]}
    response = await http.post("/tokenize", json={"messages": HI})
    assert response.json()["tokens"] == [2, 72, 105]
    tool = {"type": "function", "function": {"name": "ping"}}
    await http.post("/tokenize", json={"messages": HI, "tools": [tool]})
    assert [item.name for item in fake.tokenized[-1].chat.tools] == ["ping"]
    response = await http.post("/detokenize", json={"tokens": [2, 72, 0xE9]})
    assert response.json() == {"prompt": "Hé"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "huge"}, "model"),
    ],
)
async def test_what_cannot_be_tokenized(path: str, body: Any, param: str, http: httpx2.AsyncClient) -> None:
    response = await http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


async def test_health(http: httpx2.AsyncClient, planner: RunningPlanner) -> None:
    for path in ("/health", "/health/ready", "/health/live"):
        response = await http.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    await planner.server.set_ready(False)
    for path in ("/health", "/health/ready"):
        response = await http.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (await http.get("/health/live")).status_code == 200
    await planner.server.stop(0)
    assert (await http.get("/health")).status_code == 503


async def test_targets_and_class_from_headers(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    headers = {"x-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "12.5", "x-service-class": "chat"}
    await http.post(CHAT, json={"messages": HI}, headers=headers)
    [request] = fake.requests
    assert request.targets.ttft.ToNanoseconds() == 250_000_000
    assert request.targets.tpot.ToNanoseconds() == 12_500_000
    assert request.service_class == "chat"
    await http.post(CHAT, json={"messages": HI, "service_class": "batch"}, headers=headers)
    assert fake.requests[1].service_class == "batch"


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "86400001", ""])
async def test_targets_that_are_none(value: str, http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    response = await http.post(CHAT, json={"messages": HI}, headers={"x-slo-ttft-ms": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-slo-ttft-ms")
    assert fake.requests == []


async def test_ids_and_traces_go_through(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-request-id": "mine-7", "traceparent": trace, "tracestate": "a=b"}
    for body in ({"messages": HI}, {"messages": HI, "stream": True}, {}):
        response = await http.post(CHAT, json=body, headers=headers)
        assert response.headers["x-request-id"] == "mine-7"
    for metadata in fake.metadata:
        given = {key: metadata.get(key) for key in ("x-request-id", "traceparent", "tracestate")}
        assert given == {"x-request-id": "mine-7", "traceparent": trace, "tracestate": "a=b"}
    response = await http.post(CHAT, json={"messages": HI}, headers={"x-request-id": "x" * 129, "traceparent": "00-1"})
    assert response.headers["x-request-id"].startswith("req-")
    assert "traceparent" not in fake.metadata[-1]


async def test_large_bodies(start_gateway: Any, fake: FakePlanner) -> None:
    async with httpx2.AsyncClient(base_url=await start_gateway(max_body_bytes=1024)) as client:

        async def parts() -> AsyncIterator[bytes]:  # Without a declared length.
            for _ in range(8):
                yield b" " * 256

        for response in (
            await client.post(CHAT, json={"messages": HI, "user": "x" * 1024}),
            await client.post(CHAT, content=parts()),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert (await client.post(CHAT, json={"messages": HI})).status_code == 200
    assert len(fake.requests) == 1


async def test_keys(start_gateway: Any, tmp_path: Path, fake: FakePlanner) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nfirst\n  second \n")
    url = await start_gateway(api_keys_file=keys)
    for key, allowed in (("first", True), ("second", True), ("# ours", False), ("third", False)):
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            if allowed:
                await client.chat.completions.create(model="tiny", messages=HI)
            else:
                with pytest.raises(AuthenticationError) as caught:
                    await client.chat.completions.create(model="tiny", messages=HI)
                assert caught.value.code == "invalid_api_key"
    async with httpx2.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/v1/models", headers={"authorization": "Basic first"})).status_code == 401
    assert len(fake.requests) == 2


def test_keys_are_read_again_when_the_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("old")
    keys = ApiKeys(path)
    replacement = tmp_path / "new"
    replacement.write_text("new")
    os.replace(replacement, path)
    assert keys.allows("Bearer new")
    assert not keys.allows("Bearer old")
    path.unlink()
    assert keys.allows("bearer new")
    assert keys.allows("Bearer new")
    assert caplog.text.count("stay valid") == 1
    path.write_text("# none\n")
    assert not keys.allows("Bearer new")
    assert not keys.allows("Bearer ")


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="No such file"):
        ApiKeys(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing")
    with pytest.raises(KeysError, match="holds no key"):
        ApiKeys(tmp_path / "empty")


async def test_other_origins_only_where_they_are_named(http: httpx2.AsyncClient, start_gateway: Any) -> None:
    asked = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
    assert (await http.options(CHAT, headers=asked)).status_code == 405
    url = await start_gateway(cors_origins=["https://chat.example.com"])
    async with httpx2.AsyncClient(base_url=url) as client:
        allowed = await client.options(CHAT, headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example.com"
        refused = await client.options(CHAT, headers={**asked, "origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in refused.headers


async def test_metrics(http: httpx2.AsyncClient) -> None:
    await http.post(CHAT, json={"messages": HI})
    await http.post(CHAT, json={"messages": HI, "stream": True})
    await http.post("/v1/completions", json={"prompt": "x", "n": 2})
    await http.post(CHAT, json={})
    await http.get("/nowhere/in/particular")
    await http.request("BREW", "/v1/models")
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }

    def ended(method: str, route: str, status: int, error: str = "") -> float | None:
        labels = {
            "error_type": error,
            "http_request_method": method,
            "http_response_status_code": str(status),
            "http_route": route,
        }
        return samples.get(("http_server_request_duration_seconds_count", *sorted(labels.items())))

    assert ended("POST", CHAT, 200) == 2
    assert ended("POST", "/v1/completions", 200) == 1
    assert ended("POST", CHAT, 400, "missing_required_parameter") == 1
    assert ended("GET", "other", 404) == 1
    assert ended("_OTHER", "/v1/models", 405) == 1
    assert samples["http_server_active_requests",] == 1
    assert samples["process_memory_usage_bytes",] > 2**20
