"""A certificate authority that makes certificates for tests, as files."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme


@dataclass(frozen=True)
class Issued:
    certificate: Path
    key: Path
    ca: Path
    """Of the authority that issued it."""

    @property
    def section(self) -> dict[str, Any]:
        """[tls] of a service that has it."""
        return {"certificate": str(self.certificate), "key": str(self.key), "ca": str(self.ca)}


class Authority:
    """Its files lie in `directory`, keys with mode 0600."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._ca = trustme.CA()
        self.ca = directory / "ca.pem"
        self.ca.write_bytes(self._ca.cert_pem.bytes())

    def issue(self, file: str, *names: str, expired: bool = False) -> Issued:
        """For hosts or addresses; a second one of the same `file` takes the place of the first, as a renewal does."""
        ends = datetime.now(UTC) - timedelta(days=1) if expired else None
        made = self._ca.issue_cert(*(names or ("localhost", "127.0.0.1")), not_after=ends)
        certificate, key = self._directory / f"{file}.pem", self._directory / f"{file}.key"
        _replace(key, made.private_key_pem.bytes(), 0o600)
        _replace(certificate, b"".join(blob.bytes() for blob in made.cert_chain_pems), 0o644)
        return Issued(certificate, key, self.ca)


def _replace(path: Path, content: bytes, mode: int) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.chmod(mode)
    os.replace(fresh, path)
