"""API keys from a file, looked at again when the file changes."""

import hashlib
import hmac
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


class KeysError(Exception):
    """The file of keys cannot be used. The text names it."""


class ApiKeys:
    """One key a line; blank lines and those that begin with "#" count for nothing."""

    def __init__(self, path: Path) -> None:
        """Raises KeysError where the file holds no key: nobody could call."""
        self._path = path
        try:
            self._seen = self._stamp()
            self._digests = self._read()
        except OSError as error:
            raise KeysError(f"gateway.api_keys_file: {path}: {error.strerror}") from error
        if not self._digests:
            raise KeysError(f"gateway.api_keys_file: {path} holds no key")

    def allows(self, authorization: str) -> bool:
        """Whether the header is `Bearer KEY` with one of the keys. Takes as long for a wrong key as for a right one."""
        self._reload()
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)

    def _reload(self) -> None:
        """Keeps the keys it has while the file cannot be read."""
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._digests = self._read()
                self._seen = stamp
                logger.info("%s: %d keys", self._path, len(self._digests))
        except OSError as error:
            if self._seen:
                logger.error("%s: %s; the keys read before stay valid", self._path, error.strerror)
            self._seen = ()

    def _stamp(self) -> tuple[int, ...]:
        """Changes when the file does."""
        status = os.stat(self._path)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self) -> list[bytes]:
        lines = map(str.strip, self._path.read_text(encoding="utf-8", errors="replace").splitlines())
        return [_digest(line) for line in lines if line and not line.startswith("#")]


def _digest(key: str) -> bytes:
    """Of one length, so that comparing them tells nothing of a key's."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
