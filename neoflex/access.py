"""How a client reaches a server that asks who calls: TLS and API key, given or from the environment."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from neoflex.channel import CHANNEL_OPTIONS
from neoflex.errors import AccessError
from svc_common.security.handshake import CLIENT, Greeting

API_KEY = "NEOFLEX_API_KEY"
TLS = "NEOFLEX_TLS"
CA_FILE = "NEOFLEX_CA_FILE"
CERTIFICATE_FILE = "NEOFLEX_CERTIFICATE_FILE"
KEY_FILE = "NEOFLEX_KEY_FILE"
SERVER_NAME = "NEOFLEX_SERVER_NAME"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files are PEM. Of no effect on `unix:` addresses, which speak no TLS."""

    ca_file: str | os.PathLike[str] | None = None
    """Of the CAs that the server's certificate may come from; None: the public ones that gRPC knows."""
    certificate_file: str | os.PathLike[str] | None = None
    """The client's own, for servers that ask for one; together with `key_file`."""
    key_file: str | os.PathLike[str] | None = None
    server_name: str | None = None
    """That the server's certificate must be for; None: the host of the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises AccessError where a file can't be read."""
        if (self.certificate_file is None) != (self.key_file is None):
            raise AccessError("a client's certificate and its key go together, one of the files is missing")
        return grpc.ssl_channel_credentials(_read(self.ca_file), _read(self.key_file), _read(self.certificate_file))

    def ssl_context(self) -> ssl.SSLContext:
        """The same for HTTP. Raises AccessError."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except OSError as error:  # An SSLError too.
            files = ", ".join(str(path) for path in (self.ca_file, self.certificate_file, self.key_file) if path)
            raise AccessError(f"{files}: {error.strerror or error}") from error
        return context


@dataclass(frozen=True, slots=True)
class Access:
    """What a client has to show."""

    tls: Tls | None = None
    """None: none is spoken."""
    api_key: str | None = None

    @classmethod
    def of(cls, tls: Tls | bool | None, api_key: str | None, environment: Mapping[str, str] | None = None) -> "Access":
        """What is None is taken from the environment. True is Tls(), False speaks no TLS, and "" is no key."""
        environment = os.environ if environment is None else environment
        if tls is None:
            tls = _tls_of(environment)
        elif isinstance(tls, bool):
            tls = Tls() if tls else None
        key = environment.get(API_KEY) if api_key is None else api_key
        return cls(tls, key or None)

    @property
    def greeting(self) -> Greeting:
        """For errors of calls."""
        return Greeting(self.tls is not None, self.tls is not None and self.tls.certificate_file is not None, CLIENT)

    def channel(self, address: str) -> grpc.Channel:
        """For threads. Raises AccessError."""
        if self.tls is None or address.startswith("unix:"):
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, self.tls.credentials(), options=self._options(self.tls))

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        """For asyncio. Raises AccessError."""
        if self.tls is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, self.tls.credentials(), options=self._options(self.tls))

    def bring_key(self, stub: Any) -> None:
        """Has each call of a stub carry the API key, if there is one."""
        if self.api_key is None:
            return
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise AccessError("an API key must be of printable ASCII: it goes into a header")
        metadata = (("authorization", f"Bearer {self.api_key}"),)
        for name, call in vars(stub).items():
            setattr(stub, name, partial(call, metadata=metadata))

    def _options(self, tls: Tls) -> list[tuple[str, Any]]:
        name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
        return [*CHANNEL_OPTIONS, *name]


def _tls_of(environment: Mapping[str, str]) -> Tls | None:
    """None where no variable speaks of it."""
    names = (CA_FILE, CERTIFICATE_FILE, KEY_FILE, SERVER_NAME)
    ca, certificate, key, server_name = (environment.get(name) or None for name in names)
    if not (ca or certificate or key or server_name or environment.get(TLS, "") not in ("", "0")):
        return None
    return Tls(ca, certificate, key, server_name)


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise AccessError(f"{os.fspath(path)}: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise AccessError(f"{os.fspath(path)}: is no PEM file")
    return content
