"""What is wrong with a certificate, a key or a CA is said by key, file and reason."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.certificates import Authority, Issued

from svc_common.config import ConfigError
from svc_common.security.pem import PemFiles, read_identity


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return Authority(tmp_path).issue("own", "planner", "*.example.com", "10.0.0.7")


def files(issued: Issued) -> PemFiles:
    return PemFiles(("tls.certificate", issued.certificate), ("tls.key", issued.key), ("tls.ca", issued.ca))


def complaint(issued: Issued, now: datetime | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_identity(files(issued), now)
    return str(caught.value)


def test_what_is_right_is_read(issued: Issued) -> None:
    identity = read_identity(files(issued))
    assert identity.names == ("planner", "*.example.com", "10.0.0.7")
    assert identity.uses == {"server", "client"}
    assert identity.certificate == issued.certificate.read_bytes()
    assert identity.ca == issued.ca.read_bytes()


def test_openssl_agrees(issued: Issued) -> None:
    """Somebody else's reading of the same files."""
    names = ["openssl", "x509", "-in", issued.certificate, "-noout", "-ext", "subjectAltName"]
    text = subprocess.run(names, check=True, capture_output=True, text=True).stdout
    assert "DNS:planner, DNS:*.example.com, IP Address:10.0.0.7" in text
    subprocess.run(["openssl", "verify", "-CAfile", issued.ca, issued.certificate], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
def test_a_file_that_is_missing_or_none(name: str, issued: Issued) -> None:
    path: Path = getattr(issued, name)
    path.write_text("nothing of the kind")
    kind = "private key" if name == "key" else "certificate"
    assert complaint(issued) == f"tls.{name}: {path}: holds no {kind} in PEM, and nothing else in PEM"
    path.unlink()
    assert complaint(issued) == f"tls.{name}: {path}: No such file or directory"


@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
def test_a_file_that_is_far_too_large(name: str, issued: Issued) -> None:
    """Such as /dev/zero, which never ends."""
    path: Path = getattr(issued, name)
    with path.open("r+b") as file:
        file.truncate(5 << 20)
    assert complaint(issued) == f"tls.{name}: {path}: is larger than 4 MiB, too large for a PEM file"


def test_files_that_were_mixed_up(issued: Issued) -> None:
    mixed = Issued(issued.key, issued.key, issued.ca)
    assert complaint(mixed).startswith(f"tls.certificate: {issued.key}: holds no certificate in PEM, but ")
    assert complaint(mixed).endswith("private key")
    mixed = Issued(issued.certificate, issued.ca, issued.ca)
    assert complaint(mixed) == f"tls.key: {issued.ca}: holds no private key in PEM, but certificate"


def test_a_key_of_another_certificate(issued: Issued, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other").issue("other")
    assert complaint(Issued(issued.certificate, other.key, issued.ca)) == (
        f"tls.key: {other.key}: is not the key of {issued.certificate}"
    )


def test_a_key_that_is_encrypted(issued: Issued) -> None:
    encrypt = ["openssl", "pkcs8", "-topk8", "-in", issued.key, "-passout", "pass:secret"]
    issued.key.write_bytes(subprocess.run(encrypt, check=True, capture_output=True).stdout)
    assert complaint(issued).startswith(f"tls.key: {issued.key}: is encrypted")


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_key_that_few_may_read(mode: int, issued: Issued) -> None:
    issued.key.chmod(mode)
    read_identity(files(issued))


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_key_that_too_many_may_read(mode: int, issued: Issued) -> None:
    issued.key.chmod(mode)
    assert f"tls.key: {issued.key}: its mode is {mode:04o}" in complaint(issued)


def test_times(issued: Issued, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    assert "tls.certificate" in complaint(issued, now + timedelta(days=365_000 * 2))
    assert "is not valid before" in complaint(issued, now - timedelta(days=365_000))
    expired = Authority(tmp_path / "old").issue("own", expired=True)
    yesterday = now - timedelta(days=1)
    assert complaint(expired) == (
        f"tls.certificate: {expired.certificate}: the certificate has expired on {yesterday:%Y-%m-%d}"
    )


def test_one_of_several_authorities_may_have_expired(issued: Issued, tmp_path: Path) -> None:
    old = Authority(tmp_path / "old").issue("ca", expired=True)
    issued.ca.write_bytes(old.certificate.read_bytes() + issued.ca.read_bytes())
    read_identity(files(issued))
    issued.ca.write_bytes(old.certificate.read_bytes())
    assert complaint(issued).startswith(f"tls.ca: {issued.ca}: the certificate has expired on ")
