"""A service's certificate as gRPC and ssl take it, read again when its files change."""

import logging
import ssl
import threading
from typing import TYPE_CHECKING, Any

import grpc

from svc_common.config import ConfigError, TlsConfig

if TYPE_CHECKING:  # cryptography takes a while to import: only with [tls].
    from pathlib import Path

    from svc_common.security.pem import Identity, PemFiles

logger = logging.getLogger(__name__)


class TlsFiles:
    """Certificate, key and CAs. Safe to use from any thread: gRPC asks from its own at each connection."""

    def __init__(self, files: "PemFiles", server_name: str | None) -> None:
        """Use `of`."""
        from svc_common.security.pem import read_identity

        self._files = files
        self._read = read_identity
        self._lock = threading.Lock()
        self._identity = read_identity(files)
        self._stamp = files.stamp()
        self.server_name = server_name
        """That a service which is called must have; None: the host of its address."""

    @classmethod
    def of(cls, tls: TlsConfig | None) -> "TlsFiles | None":
        """None without [tls]. Raises ConfigError naming key and file."""
        if tls is None:
            return None
        return cls._of("tls", tls.certificate, tls.key, tls.ca, tls.server_name)

    @classmethod
    def of_pair(cls, section: str, certificate: "Path", key: "Path", tls: TlsConfig | None) -> "TlsFiles":
        """Another certificate, with the CAs of [tls] if there is one. Raises ConfigError."""
        return cls._of(section, certificate, key, tls.ca if tls else None, None)

    @classmethod
    def _of(
        cls, section: str, certificate: "Path", key: "Path", ca: "Path | None", server_name: str | None
    ) -> "TlsFiles":
        from svc_common.security.pem import PemFiles

        authorities = ("tls.ca", ca) if ca else None
        files = PemFiles((f"{section}.certificate", certificate), (f"{section}.key", key), authorities)
        return cls(files, server_name)

    def identity(self) -> "Identity":
        """Of the files as they are; of what they were, while they can't be used."""
        with self._lock:
            try:
                stamp = self._files.stamp()
                if stamp != self._stamp:
                    # First, so that files which are wrong are complained of once.
                    self._stamp = stamp
                    self._identity = self._read(self._files)
                    logger.info("%s was read again", self._files.certificate[1])
            except (ConfigError, OSError) as error:
                logger.error("%s; the certificate read before stays in use", error)
            return self._identity

    def server_credentials(self, client_certificates: bool) -> grpc.ServerCredentials:
        """Shows the certificate, and with `client_certificates` demands one. Raises ConfigError."""
        self._check_use("server")
        if client_certificates:
            self._check_has_ca()
        shown = self.identity()

        def configuration(identity: "Identity") -> grpc.ServerCertificateConfiguration:
            authorities = identity.ca if client_certificates else None
            return grpc.ssl_server_certificate_configuration([(identity.key, identity.certificate)], authorities)

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """At each connection; None: as before."""
            nonlocal shown
            identity = self.identity()
            if identity is shown:
                return None
            shown = identity
            return configuration(identity)

        fetch: Any = renewed  # The type stubs know no None.
        return grpc.dynamic_ssl_server_credentials(configuration(shown), fetch, client_certificates)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of the files as they are now. Raises ConfigError where they are of no use for calls."""
        self._check_use("client")
        self._check_has_ca()
        identity = self.identity()
        return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)

    def ssl_context(self, client_certificates: bool) -> ssl.SSLContext:
        """For a server. Raises ConfigError."""
        self._check_use("server")
        if client_certificates:
            self._check_has_ca()
        context, shown = self._new_context(client_certificates), self.identity()

        def renew(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            """As a client says hello, whatever the name it asks for."""
            nonlocal context, shown
            identity = self.identity()
            if identity is not shown:
                try:
                    context, shown = self._new_context(client_certificates), identity
                except (ssl.SSLError, OSError) as error:  # Changed once more since they were checked.
                    logger.error("%s: %s", self._files.certificate[1], error)
            connection.context = context

        first = context
        first.sni_callback = renew
        return first

    def _new_context(self, client_certificates: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._files.certificate[1], self._files.key[1])
        identity = self.identity()
        if client_certificates and identity.ca is not None:
            context.load_verify_locations(cadata=identity.ca.decode())
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session would be let in on the strength of CAs and dates that held when it began.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    def _check_use(self, use: str) -> None:
        if use not in self.identity().uses:
            name, path = self._files.certificate
            raise ConfigError(f"{name}: {path}: its extended key usage does not allow it to be a {use}'s")

    def _check_has_ca(self) -> None:
        if self.identity().ca is None:
            raise ConfigError("tls.ca is not set: peers' certificates cannot be checked")


def speaks_tls(address: str) -> bool:
    """Whether [tls] is for this address."""
    return not address.startswith("unix:")
