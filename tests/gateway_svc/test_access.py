"""HTTPS, client certificates, and the gateway's own way into a planner that asks who calls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.certificates import Authority, Issued
from support.fake_planner import FakePlanner, fake_planner

from gateway_svc.access import access_of
from gateway_svc.server import GatewayServer
from neoflex.access import Tls
from svc_common.config import ConfigError, GatewayConfig, TlsConfig, parse
from svc_common.security.api_keys import ApiKeys
from svc_common.security.door import Door
from svc_common.security.tls import TlsFiles

CHAT = "/v1/chat/completions"
HI: Any = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@asynccontextmanager
async def gateway(planner_address: str, **sections: dict[str, Any]) -> AsyncIterator[GatewayServer]:
    """With these sections of the configuration."""
    own = {"listen": "127.0.0.1:0", "min_drain_s": 0, **sections.pop("gateway", {})}
    planner = {"listen": planner_address, **sections.pop("planner", {})}
    config = parse({"gateway": own, "planner": planner, **sections}, "test")
    server = GatewayServer(config.gateway or GatewayConfig(), planner_address, 5, access=access_of(config))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def client_of(server: GatewayServer, ca: Path, own: Issued | None = None) -> httpx2.AsyncClient:
    tls = Tls(ca, own.certificate, own.key) if own else Tls(ca)
    return httpx2.AsyncClient(base_url=f"https://{server.address}", verify=tls.ssl_context())


async def test_https_and_a_renewed_certificate(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue("gateway")
    async with fake_planner() as planner:
        keys = {"certificate": str(issued.certificate), "key": str(issued.key)}
        async with gateway(planner.address, gateway=keys) as server:
            async with client_of(server, authority.ca) as client:
                assert (await client.post(CHAT, json=HI)).status_code == 200
            renewed = Authority(tmp_path / "next")
            fresh = renewed.issue("gateway")
            issued.key.write_bytes(fresh.key.read_bytes())
            issued.certificate.write_bytes(fresh.certificate.read_bytes())
            async with client_of(server, renewed.ca) as client:
                assert (await client.post(CHAT, json=HI)).status_code == 200
            async with client_of(server, authority.ca) as client:
                with pytest.raises(httpx2.ConnectError):
                    await client.post(CHAT, json=HI)
            async with httpx2.AsyncClient(base_url=f"http://{server.address}") as client:
                with pytest.raises(httpx2.HTTPError):
                    await client.post(CHAT, json=HI)
    assert len(planner.fake.requests) == 2


async def test_client_certificates(authority: Authority, tmp_path: Path) -> None:
    issued, own = authority.issue("gateway"), authority.issue("client")
    theirs = Authority(tmp_path / "theirs").issue("client")
    late = authority.issue("late", expired=True)
    kept = tmp_path / "kept.pem"
    kept.write_bytes(authority.ca.read_bytes())
    # The planner behind it is another matter, and on a Unix socket.
    async with fake_planner(f"unix:{tmp_path}/planner") as planner:
        sections = {"tls": issued.section, "gateway": {"client_certificates": True}}
        async with gateway(planner.address, **sections) as server:
            async with client_of(server, authority.ca, own) as client:
                assert (await client.post(CHAT, json=HI)).status_code == 200
            for wrong in (None, theirs, late):
                async with client_of(server, authority.ca, wrong) as client:
                    with pytest.raises(httpx2.HTTPError):
                        await client.post(CHAT, json=HI)
            # The CA is exchanged: who was a stranger is let in, and who was let in is a stranger.
            issued.ca.write_bytes(theirs.ca.read_bytes())
            async with client_of(server, kept, theirs) as client:
                assert (await client.post(CHAT, json=HI)).status_code == 200
            async with client_of(server, kept, own) as client:
                with pytest.raises(httpx2.HTTPError):
                    await client.post(CHAT, json=HI)
    assert len(planner.fake.requests) == 2


async def test_the_planner_lets_the_gateway_in(authority: Authority, tmp_path: Path) -> None:
    """By certificate and key, on every route."""
    keys = tmp_path / "keys"
    keys.write_text("theirs\nours\n")
    own_key = tmp_path / "own"
    own_key.write_text("ours")
    tls = TlsFiles.of(TlsConfig.model_validate(authority.issue("planner").section))
    door = Door(tls, client_certificates=True, keys=ApiKeys("planner.api_keys_file", keys))
    issued = authority.issue("gateway")
    async with fake_planner(door=door) as planner:
        sections = {"tls": issued.section, "gateway": {"planner_key_file": str(own_key)}}
        async with gateway(planner.address, **sections) as server, client_of(server, authority.ca) as client:
            await _all_routes(client, planner.fake)
        sections = {"tls": issued.section, "planner": {"api_keys_file": str(keys)}}  # The first of these.
        async with gateway(planner.address, **sections) as server, client_of(server, authority.ca) as client:
            assert (await client.post(CHAT, json=HI)).status_code == 200


async def _all_routes(client: httpx2.AsyncClient, fake: FakePlanner) -> None:
    assert (await client.post(CHAT, json=HI)).status_code == 200
    async with client.stream("POST", CHAT, json={**HI, "stream": True}) as response:
        text = "".join([part async for part in response.aiter_text()])
    assert text.endswith("data: [DONE]\n\n")
    assert [dict(metadata)["authorization"] for metadata in fake.metadata] == ["Bearer ours"] * 2
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert (await client.post("/detokenize", json={"tokens": [65]})).status_code == 200
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200


async def test_a_planner_that_refuses_it_is_the_operators_affair(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("theirs")
    async with (
        fake_planner(door=Door(keys=ApiKeys("planner.api_keys_file", keys))) as planner,
        gateway(planner.address) as server,
        httpx2.AsyncClient(base_url=f"http://{server.address}") as client,
    ):
        response = await client.post(CHAT, json=HI, headers={"authorization": "Bearer theirs"})
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "planner_refuses_gateway"
    assert "gateway.planner_key_file" in response.json()["error"]["message"]
    assert planner.fake.requests == []


async def test_a_planner_that_speaks_tls_alone(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    tls = TlsFiles.of(TlsConfig.model_validate(authority.issue("planner").section))
    async with (
        fake_planner(door=Door(tls)) as planner,
        gateway(planner.address) as server,
        httpx2.AsyncClient(base_url=f"http://{server.address}") as client,
    ):
        responses = [await client.post(CHAT, json=HI) for _ in range(2)]
        assert (await client.get("/health/ready")).status_code == 503
    said = f"{planner.address} hangs up at once: it is likely to speak TLS alone; see [tls] of both services"
    assert [response.status_code for response in responses] == [503, 503]
    assert [response.json()["error"]["message"] for response in responses] == [said, said]
    assert [record.getMessage() for record in caplog.records if record.name == "gateway_svc.planner"] == [said]


async def test_headers_have_a_limit() -> None:
    async with (
        fake_planner() as planner,
        gateway(planner.address) as server,
        httpx2.AsyncClient(base_url=f"http://{server.address}") as client,
    ):
        assert (await client.post(CHAT, json=HI, headers={"x-large": "x" * 60_000})).status_code == 200
        assert (await client.post(CHAT, json=HI, headers={"x-large": "x" * 100_000})).status_code == 400
    assert len(planner.fake.requests) == 1


async def test_a_unix_socket_is_its_users_own(tmp_path: Path) -> None:
    async with fake_planner() as planner, gateway(planner.address, gateway={"listen": f"unix:{tmp_path}/http"}):
        assert (tmp_path / "http").stat().st_mode & 0o777 == 0o600


def test_files_that_are_wrong(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue("gateway")
    issued.key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"gateway\.key: .*its mode is 0644"):
        access_of(parse({"gateway": {"certificate": str(issued.certificate), "key": str(issued.key)}}, "test"))
    with pytest.raises(ConfigError, match=r"gateway\.planner_key_file: .*No such file"):
        access_of(parse({"gateway": {"planner_key_file": str(tmp_path / "none")}}, "test"))
