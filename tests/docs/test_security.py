"""The commands and the configuration that docs/security.md shows do what it says."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from support.inference import inference_server

from neoflex import Client, Tls, UnauthenticatedError, UnavailableError
from svc_common.config import TlsConfig, parse
from svc_common.security.api_keys import ApiKeys
from svc_common.security.door import Door
from svc_common.security.pem import PemFiles, read_identity
from svc_common.security.tls import TlsFiles

DOC = Path(__file__).parents[2] / "docs" / "security.md"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert found
    return [str(block) for block in found]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands have run."""
    directory = tmp_path_factory.mktemp("made")
    [commands] = blocks("sh")
    subprocess.run(["sh", "-eu"], input=commands, text=True, cwd=directory, check=True, capture_output=True)
    return directory


def test_every_pair_that_was_made_can_be_used(made: Path) -> None:
    for name in ("planner", "gpu", "cpu-attn", "gateway", "client"):
        pair = ("tls.certificate", made / f"{name}.pem"), ("tls.key", made / f"{name}.key")
        identity = read_identity(PemFiles(*pair, ("tls.ca", made / "ca.pem")))
        assert identity.names == (name, "localhost", "127.0.0.1")
        assert identity.uses == {"server", "client"}
    for file in (*made.glob("*.key"), made / "api-keys"):
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_client_with_them_gets_in(made: Path) -> None:
    tls = TlsFiles.of(TlsConfig(certificate=made / "planner.pem", key=made / "planner.key", ca=made / "ca.pem"))
    door = Door(tls, client_certificates=True, keys=ApiKeys("planner.api_keys_file", made / "api-keys"))
    key = (made / "api-keys").read_text().strip()
    own = Tls(made / "ca.pem", made / "client.pem", made / "client.key")
    with inference_server(door=door) as server:
        with Client(server.address, tls=own, api_key=key) as client:
            assert client.generate("hello").text == "a b c"
        with Client(server.address, tls=own, api_key="") as client, pytest.raises(UnauthenticatedError):
            client.generate("hello")
        with Client(server.address, tls=Tls(made / "ca.pem"), api_key=key) as client, pytest.raises(UnavailableError):
            client.generate("hello")


@pytest.mark.parametrize("text", blocks("toml"))
def test_every_configuration_is_one(text: str) -> None:
    parse(tomllib.loads(text), DOC.name)
