"""[gateway]."""

from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, model_validator

from svc_common.config.types import Address, Group, Section, Size

_MAX_BODY_BYTES = 48 * 2**20
"""Leaves room in the planner's largest message for what JSON writes shorter than protobuf."""


class GatewayConfig(Section):
    """gateway_svc: the OpenAI-compatible HTTP face. [gateway] starts it beside the other services; `neoflex up` does
    without being told."""

    listen: Address = "127.0.0.1:8000"
    """Address of the HTTP service; `host:port` or `unix:path`. Where it is not set and the port is taken, `neoflex up`
    takes a free one."""
    api_keys_file: Path | None = None
    """API keys, one a line, "#" begins a comment; read again when it changes. All but /health and the console's files
    then asks for `Authorization: Bearer KEY`. Default: whoever reaches the address may call."""
    certificate: Path | None = None
    """Certificate that the HTTP service shows, e.g. of a public CA; default: that of [tls], if any."""
    key: Path | None = None
    """Private key of `certificate`."""
    client_certificates: bool = False
    """With TLS, refuses whoever shows no certificate of `tls.ca`."""
    socket_group: Group | None = None
    """Group that may connect where `listen` is a Unix socket; default: the service's own user alone."""
    planner_key_file: Path | None = None
    """File with the key that the gateway shows the planner; default: the first in `planner.api_keys_file`, if any."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call, e.g. "https://chat.example.com"; "*" for any. None by default."""
    max_body_bytes: Annotated[Size, Field(ge=1024, le=_MAX_BODY_BYTES)] = ByteSize(8 * 2**20)
    """Largest body of a request."""
    min_drain_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """So long at least 503 is answered after SIGTERM before connections are refused, that load balancers may notice;
    then for as long as the planner drains. It ends earlier where the planner has ended."""
    console: bool = True
    """Serves a page at / with a chat and what the server does at the moment."""

    @model_validator(mode="after")
    def _has_key_and_certificate_or_none(self) -> "GatewayConfig":
        if (self.certificate is None) != (self.key is None):
            missing = "certificate" if self.certificate is None else "key"
            raise ValueError(f"certificate and key go together, {missing} is missing")
        return self
