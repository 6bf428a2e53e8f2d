"""Clients and commands in front of a server that asks for a certificate and a key."""

import asyncio
import http.server
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificates import Authority, Issued
from support.command import Run
from support.inference import InferenceServer, inference_server
from support.stacks import own_environment
from support.traces import gpu_only

from neoflex import (
    AccessError,
    AsyncClient,
    Client,
    DeadlineExceededError,
    NeoflexError,
    Tls,
    UnauthenticatedError,
    UnavailableError,
)
from neoflex.access import Access
from neoflex.health import complaint
from svc_common.config import TlsConfig
from svc_common.security.api_keys import ApiKeys
from svc_common.security.door import Door
from svc_common.security.handshake import handshake_trouble
from svc_common.security.tls import TlsFiles


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> Issued:
    return authority.issue("client")


@pytest.fixture(scope="module")
def guarded(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    """Asks for both."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n")
    tls = TlsFiles.of(TlsConfig.model_validate(authority.issue("planner", "planner.internal").section))
    door = Door(tls, client_certificates=True, keys=ApiKeys("planner.api_keys_file", keys))
    with inference_server(door=door) as running:
        yield running


def tls_of(issued: Issued) -> Tls:
    return Tls(issued.ca, issued.certificate, issued.key, "planner.internal")


def refused(server: InferenceServer, tls: Tls | bool, api_key: str) -> NeoflexError:
    with Client(server.address, tls=tls, api_key=api_key) as client, pytest.raises(NeoflexError) as caught:
        client.generate("hello")
    return caught.value


def test_with_both_a_client_is_served(guarded: InferenceServer, own: Issued) -> None:
    with Client(guarded.address, tls=tls_of(own), api_key="secret") as client:
        assert client.generate("hello").text == "a b c"
        assert "".join(delta.text for delta in client.stream("hello"))
        assert client.abort("nobody") is not None
        assert client.model_info().name
        assert client.is_ready()

    async def run() -> str:
        async with AsyncClient(guarded.address, tls=tls_of(own), api_key="secret") as client:
            assert await client.is_ready()
            pieces = [delta.text async for delta in client.stream("hello")]
            assert pieces
            return (await client.generate("hello")).text

    assert asyncio.run(run()) == "a b c"


def test_without_a_key_it_is_not(guarded: InferenceServer, own: Issued) -> None:
    for key in ("", "wrong"):
        error = refused(guarded, tls_of(own), key)
        assert isinstance(error, UnauthenticatedError)
        assert error.reason == "API_KEY_INVALID"


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (
            "another name",
            "no TLS with {}: its certificate is for another name; see --server-name,",
        ),
        ("foreign CA", "no TLS with {}: its certificate does not come from a CA that is trusted here; see --ca-file,"),
        ("public CAs", "no TLS with {}: its certificate does not come from a CA that is trusted here; see --ca-file,"),
        ("no certificate", "no TLS with {}: it hangs up, likely for want of a client certificate; see --certificate"),
        (
            "foreign certificate",
            "no TLS with {}: it hangs up, likely as the certificate shown has expired or does ",
        ),
        (
            "expired certificate",
            "no TLS with {}: it hangs up, likely as the certificate shown has expired or does ",
        ),
        ("a key as CA", "no TLS with {}: a file given here holds no PEM of the kind that it should; see --ca-file"),
        (
            "another's key",
            "no TLS with {}: a file given here holds no PEM of the kind that it should, or a key is not that of its "
            "certificate; see --ca-file",
        ),
        ("plain", "{} hangs up at once: it is likely to speak TLS alone; see --tls and --ca-file, NEOFLEX_CA_FILE,"),
    ],
)
def test_what_is_wrong_with_tls_is_said(
    mistake: str, said: str, guarded: InferenceServer, own: Issued, authority: Authority, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path / "foreign")
    late, theirs = authority.issue("late", expired=True), foreign.issue("theirs")
    tls = {
        "another name": Tls(own.ca, own.certificate, own.key),
        "foreign CA": Tls(foreign.ca, own.certificate, own.key, "planner.internal"),
        "public CAs": Tls(None, own.certificate, own.key, "planner.internal"),
        "no certificate": Tls(own.ca, server_name="planner.internal"),
        "foreign certificate": Tls(own.ca, theirs.certificate, theirs.key, "planner.internal"),
        "expired certificate": Tls(own.ca, late.certificate, late.key, "planner.internal"),
        "plain": False,
        "a key as CA": Tls(own.key, server_name="planner.internal"),
        "another's key": Tls(own.ca, own.certificate, theirs.key, "planner.internal"),
    }[mistake]
    said = said.format(guarded.address)
    error = refused(guarded, tls, "secret")
    assert isinstance(error, UnavailableError)
    assert error.message.startswith(said)

    async def alike() -> str:
        async with AsyncClient(guarded.address, tls=tls, api_key="secret", max_retries=0) as client:
            with pytest.raises(UnavailableError) as caught:
                [delta async for delta in client.stream("hello")]
            return caught.value.message

    assert asyncio.run(alike()).startswith(said)


def test_a_server_without_tls(own: Issued) -> None:
    with inference_server() as plain:
        assert "the server speaks none; see --tls" in str(refused(plain, tls_of(own), "secret"))


def test_who_waits_is_told_as_well(guarded: InferenceServer) -> None:
    with Client(guarded.address, tls=False) as client, pytest.raises(DeadlineExceededError) as caught:
        client.wait_until_ready(1)
    assert "was not ready within 1 s: " in caught.value.message
    assert "likely to speak TLS alone" in caught.value.message


def test_health_says_the_same(guarded: InferenceServer, own: Issued) -> None:
    found = complaint(guarded.address, "readiness", 5, Access(Tls(own.ca, server_name="planner.internal")))
    assert found is not None
    assert found.startswith(f"no TLS with {guarded.address}: it hangs up, likely for want of a client certificate; see")


def test_the_command_says_it_alone(guarded: InferenceServer, tmp_path: Path) -> None:
    """Without lines of gRPC's core."""
    foreign = Authority(tmp_path / "foreign").ca
    options = ("--server-name", "planner.internal", "--ca-file", str(foreign))
    command = [sys.executable, "-m", "neoflex.cli", "health", guarded.address, *options]
    ended = subprocess.run(command, env=own_environment(), check=False, capture_output=True, text=True)
    said = f"no TLS with {guarded.address}: its certificate does not come from a CA that is trusted here; see --ca-file"
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"error: {said}")
    assert ended.stderr.count("\n") == 1


def test_a_socket_that_closes_is_no_matter_of_tls() -> None:
    text = "failed to connect to all addresses; last error: UNAVAILABLE: unix:/x: Socket closed"
    plain = Access().greeting
    assert handshake_trouble(text, "unix:/x", plain) == ""
    assert handshake_trouble("Socket closed", "127.0.0.1:1", plain) == ""  # In the middle of an answer.


def test_files_that_are_none(own: Issued, tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="/nowhere: No such file"):
        Client(tls=Tls("/nowhere"))
    (tmp_path / "text").write_text("text")
    with pytest.raises(AccessError, match="text: is no PEM file"):
        Client(tls=Tls(tmp_path / "text"))
    with pytest.raises(AccessError, match="go together"):
        Client(tls=Tls(own.ca, own.certificate))
    with pytest.raises(AccessError, match="printable ASCII"):
        Client(api_key="schlüssel")


def test_what_is_not_given_comes_from_the_environment() -> None:
    files = {"NEOFLEX_CA_FILE": "a", "NEOFLEX_CERTIFICATE_FILE": "c", "NEOFLEX_KEY_FILE": "k"}
    environment = {**files, "NEOFLEX_SERVER_NAME": "n", "NEOFLEX_API_KEY": "key"}
    assert Access.of(None, None, environment) == Access(Tls("a", "c", "k", "n"), "key")
    assert Access.of(False, "", environment) == Access(None, None)
    assert Access.of(True, "mine", environment) == Access(Tls(), "mine")
    assert Access.of(None, None, {"NEOFLEX_TLS": "1"}) == Access(Tls(), None)
    assert Access.of(None, None, {"NEOFLEX_TLS": "0", "NEOFLEX_API_KEY": ""}) == Access(None, None)


def options_of(own: Issued) -> list[str]:
    files = ["--ca-file", str(own.ca), "--certificate-file", str(own.certificate), "--key-file", str(own.key)]
    return [*files, "--server-name", "planner.internal"]


def test_each_command_gets_in_by_options(guarded: InferenceServer, own: Issued, run: Run, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    at = ["--address", guarded.address, *options_of(own), "--api-key-file", str(key)]
    assert "a b c" in run("generate", "hello", "--json", *at).out
    assert json.loads(run("status", "--json", *at).out)["model"]["name"]
    guarded.traces.traces = [gpu_only(1, 0)]
    assert run("trace", "--seconds", "20", "--iterations", "1", "--output", str(tmp_path / "t.json"), *at).code == 0
    assert run("bench", "--requests", "2", "--warm-up", "0", "--json", *at).code == 0
    assert run("health", guarded.address, *options_of(own)).code == 0


def test_each_command_gets_in_by_the_environment(
    guarded: InferenceServer, own: Issued, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("status", "--address", guarded.address).code == 1
    for name, value in (("CA", own.ca), ("CERTIFICATE", own.certificate), ("KEY", own.key)):
        monkeypatch.setenv(f"NEOFLEX_{name}_FILE", str(value))
    monkeypatch.setenv("NEOFLEX_SERVER_NAME", "planner.internal")
    ended = run("status", "--address", guarded.address)
    assert (ended.code, "UNAUTHENTICATED API_KEY_INVALID" in ended.err) == (1, True)
    assert run("health", guarded.address).code == 0
    monkeypatch.setenv("NEOFLEX_API_KEY", "secret")
    assert run("status", "--address", guarded.address).code == 0
    assert run("generate", "hello", "--address", guarded.address, "--json").code == 0


class _Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_health_by_https(own: Issued, authority: Authority) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Ready) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own.certificate, own.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"https://127.0.0.1:{server.server_port}"
        try:
            assert complaint(url, "readiness", 20, Access(Tls(authority.ca))) is None
            assert "certificate verify failed" in str(complaint(url, "readiness", 20))
        finally:
            server.shutdown()
            thread.join()
