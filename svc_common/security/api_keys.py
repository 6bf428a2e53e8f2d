"""API keys from a file, looked at again when the file changes, and the interceptor that asks callers for one."""

import errno
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from svc_common.config import Config, ConfigError
from svc_common.errors import unauthenticated

_OPEN_SERVICE = "/grpc.health.v1.Health/"
_MAX_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class ApiKeys:
    """One key a line; blank lines and those that begin with "#" count for nothing."""

    def __init__(self, name: str, path: Path) -> None:
        """`name` of the file in the configuration. Raises ConfigError where it holds no key: nobody could call."""
        self._path = path
        self._seen: tuple[int, ...]
        try:
            self._seen = self._stamp()
            self._digests = list(map(_digest, _keys(path)))
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError as error:
            raise ConfigError(f"{name}: {path}: {error.strerror}") from error
        if not self._digests:
            raise ConfigError(f"{name}: {path} holds no key")
        if mode & stat.S_IROTH:
            logger.warning("%s: %s may be read by everybody on this machine: chmod 600", name, path)

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
                self._digests = list(map(_digest, _keys(self._path)))
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


def first_key(name: str, path: Path) -> str:
    """To call with. `name` of the file in the configuration. Raises ConfigError."""
    try:
        keys = _keys(path)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from error
    if not keys:
        raise ConfigError(f"{name}: {path} holds no key")
    if not (keys[0].isascii() and keys[0].isprintable()):
        raise ConfigError(f"{name}: {path}: a header can't carry its first key: it is not of printable ASCII")
    return keys[0]


def planner_key(config: Config) -> str | None:
    """With which those call the planner that share its configuration; None: it asks for none. Raises ConfigError."""
    path = config.planner.api_keys_file
    return first_key("planner.api_keys_file", path) if path else None


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the type stubs only
    """Refuses calls without a key, before their message is read. Health may be asked for by anybody."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN_SERVICE):
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        given = next((value for key, value in metadata if key == "authorization"), "")
        if self._keys.allows(given if isinstance(given, str) else ""):
            return await continuation(handler_call_details)
        return _REFUSAL


async def _refuse(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    raise unauthenticated("API_KEY_INVALID", "no valid API key; send one in the metadata: authorization: Bearer KEY")
    yield b""  # Makes it a generator.


# As of a stream, whatever was called: on the wire they are the same, and only a stream's message is read on demand.
_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse, bytes, bytes)


def _keys(path: Path) -> list[str]:
    """Raises OSError, also where the file is far too large for what it should be."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {_MAX_BYTES >> 20} MiB")
    lines = map(str.strip, content.decode("utf-8", "replace").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _digest(key: str) -> bytes:
    """Of one length, so that comparing them tells nothing of a key's."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
