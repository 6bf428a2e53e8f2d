"""TLS between services: who gets in, who does not, and certificates that are renewed under way."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import Authority, Issued

from svc_common.config import ConfigError, TlsConfig
from svc_common.grpc_server import CHANNEL_OPTIONS, GrpcServer
from svc_common.security.door import Door
from svc_common.security.tls import TlsFiles
from svc_common.service_link import ServiceLink

SERVING = health_pb2.HealthCheckResponse.SERVING
REQUEST = health_pb2.HealthCheckRequest(service="liveness")


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def tls_of(issued: Issued, **keys: Any) -> TlsFiles:
    tls = TlsFiles.of(TlsConfig.model_validate({**issued.section, **keys}))
    assert tls is not None
    return tls


@asynccontextmanager
async def serving(listen: str, door: Door) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(listen, [], door)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def ask(address: str, tls: TlsFiles | None) -> int:
    """One call over a connection of its own. Raises AioRpcError."""
    link = ServiceLink(address, health_pb2_grpc.HealthStub, tls, CHANNEL_OPTIONS)
    try:
        return int((await link.stub.Check(REQUEST, timeout=20)).status)
    finally:
        await link.close()


async def refusal(address: str, tls: TlsFiles | None) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address, tls)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(caught.value.details())


async def test_each_shows_the_other_a_certificate(ours: Authority) -> None:
    door = Door(tls_of(ours.issue("gpu")), client_certificates=True)
    async with serving("127.0.0.1:0", door) as server:
        assert await ask(server.address, tls_of(ours.issue("planner"))) == SERVING


async def test_who_shows_none_or_a_wrong_one_gets_nowhere(ours: Authority, tmp_path: Path) -> None:
    door = Door(tls_of(ours.issue("gpu")), client_certificates=True)
    theirs = Authority(tmp_path / "theirs").issue("planner")
    stranger = Issued(theirs.certificate, theirs.key, ours.ca)
    async with serving("127.0.0.1:0", door) as server:
        assert await refusal(server.address, None)  # No TLS at all.
        assert await refusal(server.address, tls_of(stranger))
        expired = ours.issue("expired", expired=True)
        bare = grpc.ssl_channel_credentials(ours.ca.read_bytes())
        late = grpc.ssl_channel_credentials(
            ours.ca.read_bytes(), expired.key.read_bytes(), expired.certificate.read_bytes()
        )
        for credentials in (bare, late):
            async with grpc.aio.secure_channel(server.address, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await health_pb2_grpc.HealthStub(channel).Check(REQUEST, timeout=20)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_that_is_not_the_one_is_not_called(ours: Authority, tmp_path: Path) -> None:
    planner = tls_of(ours.issue("planner"))
    theirs = tls_of(Authority(tmp_path / "theirs").issue("gpu"))
    async with serving("127.0.0.1:0", Door(theirs)) as server:
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal(server.address, planner)
    async with serving("127.0.0.1:0", Door(tls_of(ours.issue("gpu", "gpu.internal")))) as server:
        assert "Hostname Verification Check failed" in await refusal(server.address, planner)
        named = tls_of(ours.issue("planner"), server_name="gpu.internal")
        assert await ask(server.address, named) == SERVING
    async with serving("127.0.0.1:0", Door()) as server:
        assert "WRONG_VERSION_NUMBER" in await refusal(server.address, planner)


async def test_the_public_door_asks_for_no_certificate_unless_told(ours: Authority) -> None:
    async with serving("127.0.0.1:0", Door(tls_of(ours.issue("planner")))) as server:
        credentials = grpc.ssl_channel_credentials(ours.ca.read_bytes())
        async with grpc.aio.secure_channel(server.address, credentials) as channel:
            assert (await health_pb2_grpc.HealthStub(channel).Check(REQUEST, timeout=20)).status == SERVING


async def test_unix_sockets_speak_none(ours: Authority, tmp_path: Path) -> None:
    door = Door(tls_of(ours.issue("gpu")), client_certificates=True)
    async with serving(f"unix:{tmp_path}/s", door) as server:
        assert await ask(server.address, tls_of(ours.issue("planner"))) == SERVING
        assert await ask(server.address, None) == SERVING


async def test_openssl_finds_what_was_configured(ours: Authority) -> None:
    issued = ours.issue("gpu", "gpu", "localhost")
    texts = []
    async with serving("127.0.0.1:0", Door(tls_of(issued), client_certificates=True)) as server:
        command = ["openssl", "s_client", "-connect", server.address, "-CAfile", str(issued.ca), "-alpn", "h2"]
        command += ["-servername", "gpu", "-verify_hostname", "gpu", "-verify_return_error"]
        own = ["-cert", str(issued.certificate), "-key", str(issued.key)]
        for more in ([], own, ["-tls1_1"]):
            process = await asyncio.create_subprocess_exec(
                *command, *more, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            texts.append((await process.communicate())[0].decode(errors="replace"))
    without, with_own, old = texts
    assert "unexpected eof" in without or "alert" in without
    assert "Verify return code: 0 (ok)" in with_own
    assert "ALPN protocol: h2" in with_own
    assert "Cipher is (NONE)" in old or "no protocols available" in old


async def test_renewed_files_are_taken_without_a_restart(ours: Authority, tmp_path: Path) -> None:
    """Both sides' at once, from another CA: connections go on, and new ones need the new files."""
    gpu, planner = ours.issue("gpu"), ours.issue("planner")
    server_tls, client_tls = tls_of(gpu), tls_of(planner)
    async with serving("127.0.0.1:0", Door(server_tls, client_certificates=True)) as server:
        link = ServiceLink(server.address, health_pb2_grpc.HealthStub, client_tls, CHANNEL_OPTIONS)
        watch = link.stub.Watch(REQUEST)
        assert (await watch.read()).status == SERVING
        old = tls_of(_copied(planner, tmp_path / "old"))
        theirs = Authority(tmp_path / "theirs")
        _take_over(theirs.issue("gpu"), gpu)
        _take_over(theirs.issue("planner"), planner)
        assert (await link.stub.Check(REQUEST, timeout=20)).status == SERVING  # Over the connection that is there.
        assert await refusal(server.address, old)
        assert await ask(server.address, client_tls) == SERVING
        await server.set_alive(False)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        address = server.address
    async with serving(address, Door(server_tls, client_certificates=True)):
        assert (await link.stub.Check(REQUEST, timeout=20, wait_for_ready=True)).status == SERVING
    await link.close()


def test_files_that_are_wrong_meanwhile_change_nothing(ours: Authority, caplog: pytest.LogCaptureFixture) -> None:
    issued = ours.issue("gpu")
    tls = tls_of(issued)
    before = tls.identity()
    content = issued.certificate.read_bytes()
    issued.certificate.write_bytes(b"half a cert")
    assert tls.identity() is before
    assert tls.identity() is before
    assert caplog.text.count("the certificate read before stays in use") == 1
    issued.certificate.write_bytes(content)
    assert tls.identity() is not before
    assert tls.identity().certificate == content


def test_what_a_certificate_cannot_be_used_for(ours: Authority, tmp_path: Path) -> None:
    issued = ours.issue("gpu")
    files = tls_of(Issued(issued.certificate, issued.key, issued.ca), ca=None)
    with pytest.raises(ConfigError, match=r"tls.ca is not set"):
        files.channel_credentials()
    with pytest.raises(ConfigError, match=r"tls.ca is not set"):
        files.server_credentials(client_certificates=True)
    files.server_credentials(client_certificates=False)
    for_servers = tmp_path / "server.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {tmp_path}/server.key "
        f"-out {for_servers} -days 2 -subj /CN=gpu -addext subjectAltName=DNS:gpu -addext extendedKeyUsage=serverAuth"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    (tmp_path / "server.key").chmod(0o600)
    files = tls_of(Issued(for_servers, tmp_path / "server.key", for_servers))
    files.server_credentials(client_certificates=True)
    with pytest.raises(ConfigError, match="extended key usage does not allow it to be a client's"):
        files.channel_credentials()


def _copied(issued: Issued, directory: Path) -> Issued:
    directory.mkdir()
    paths = [directory / path.name for path in (issued.certificate, issued.key, issued.ca)]
    copies = Issued(*paths)
    _take_over(issued, copies)
    return copies


def _take_over(new: Issued, old: Issued) -> None:
    for source, target in ((new.certificate, old.certificate), (new.key, old.key), (new.ca, old.ca)):
        target.write_bytes(source.read_bytes())
        target.chmod(0o600)
