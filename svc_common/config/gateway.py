"""[gateway]."""

from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field

from svc_common.config.types import Address, Section, Size

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
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call, e.g. "https://chat.example.com"; "*" for any. None by default."""
    max_body_bytes: Annotated[Size, Field(ge=1024, le=_MAX_BODY_BYTES)] = ByteSize(8 * 2**20)
    """Largest body of a request."""
    console: bool = True
    """Serves a page at / with a chat and what the server does at the moment."""
