"""Reads a certificate, its key and CAs from PEM files, and says which file is wrong and how."""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from svc_common.config import ConfigError

_LABEL = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----")
_MAX_BYTES = 4 << 20
"""Ten times what a system trusts in all; a wrong path, /dev/zero say, is not to fill the memory."""
_USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Where they are, and how the configuration names them."""

    certificate: tuple[str, Path]
    key: tuple[str, Path]
    ca: tuple[str, Path] | None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.certificate[1], self.key[1], *([self.ca[1]] if self.ca else []))

    def stamp(self) -> tuple[tuple[int, ...], ...]:
        """Changes when one of them does, or what one is a link to. Raises OSError."""
        return tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in map(os.stat, self.paths))


@dataclass(frozen=True, slots=True)
class Identity:
    """What was in the files, checked: PEM."""

    certificate: bytes
    """The service's own first."""
    key: bytes
    ca: bytes | None
    names: tuple[str, ...]
    """That the certificate is for: of hosts, then addresses."""
    uses: frozenset[str]
    """"server" and "client", as far as the certificate allows."""


def read_identity(files: PemFiles, now: datetime | None = None) -> Identity:
    """Raises ConfigError naming key and file."""
    now = now or datetime.now(UTC)
    certificate, own = _certificates(*files.certificate)
    _check_valid(*files.certificate, own[:1], now)
    key = _key(*files.key, own[0], files.certificate[1])
    ca = None
    if files.ca is not None:
        ca, authorities = _certificates(*files.ca)
        _check_valid(*files.ca, authorities, now)
    return Identity(certificate, key, ca, _names(own[0]), _uses(own[0]))


def _bytes(name: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{name}: {path}: is larger than {_MAX_BYTES >> 20} MiB, too large for a PEM file")
    return content


def _certificates(name: str, path: Path) -> tuple[bytes, list[x509.Certificate]]:
    content = _bytes(name, path)
    if b"CERTIFICATE" not in _LABEL.findall(content):
        raise ConfigError(f"{name}: {path}: holds no certificate in PEM, {_found(content)}")
    try:
        return content, x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise ConfigError(f"{name}: {path}: a certificate in it cannot be read: {error}") from error


def _key(name: str, path: Path, certificate: x509.Certificate, certificate_path: Path) -> bytes:
    content = _bytes(name, path)
    if not any(label.endswith(b"PRIVATE KEY") for label in _LABEL.findall(content)):
        raise ConfigError(f"{name}: {path}: holds no private key in PEM, {_found(content)}")
    # As PostgreSQL and others have it: a group may be handed a key, all accounts of the machine may not.
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ConfigError(
            f"{name}: {path}: its mode is {mode:04o}: who can read it can pass for this service; chmod 600, or 640 "
            "where the service has it by its group"
        )
    try:
        key = load_pem_private_key(content, None)
    except TypeError as error:
        raise ConfigError(f"{name}: {path}: is encrypted; nobody is there to be asked for the password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{name}: {path}: the private key cannot be read: {error}") from error
    if not _is_key_of(key, certificate):
        raise ConfigError(f"{name}: {path}: is not the key of {certificate_path}")
    return content


def _is_key_of(key: PrivateKeyTypes, certificate: x509.Certificate) -> bool:
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)


def _check_valid(name: str, path: Path, certificates: Iterable[x509.Certificate], now: datetime) -> None:
    """Of CAs one is enough: an old one may stay while its successor takes over."""
    complaints = []
    for certificate in certificates:
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if begin <= now <= end:
            return
        complaints.append(f"has expired on {end:%Y-%m-%d}" if end < now else f"is not valid before {begin:%Y-%m-%d}")
    raise ConfigError(f"{name}: {path}: the certificate {'; another '.join(complaints)}")


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = map(str, found.get_values_for_type(x509.IPAddress))
    return (*found.get_values_for_type(x509.DNSName), *addresses)


def _uses(certificate: x509.Certificate) -> frozenset[str]:
    """One that says nothing of it may be used for both."""
    try:
        allowed = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return frozenset(_USES)
    return frozenset(use for use, oid in _USES.items() if oid in allowed)


def _found(content: bytes) -> str:
    labels = ", ".join(sorted({label.decode().lower() for label in _LABEL.findall(content)}))
    return f"but {labels}" if labels else "and nothing else in PEM"
