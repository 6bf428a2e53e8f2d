"""How the gateway proves who it is, to HTTP callers and to the planner, by the configuration."""

from dataclasses import dataclass

from svc_common.config import Config, GatewayConfig
from svc_common.security.api_keys import first_key, planner_key
from svc_common.security.door import socket_group
from svc_common.security.tls import TlsFiles, speaks_tls


@dataclass(frozen=True, slots=True)
class Access:
    """By default: HTTP, and a planner that asks for nothing."""

    https: TlsFiles | None = None
    """Shown to HTTP callers."""
    tls: TlsFiles | None = None
    """For calls to the planner."""
    planner_key: str | None = None
    socket_group: int | None = None


def access_of(config: Config) -> Access:
    """Raises ConfigError naming key and file."""
    gateway = config.gateway or GatewayConfig()
    tls = https = TlsFiles.of(config.tls)
    if gateway.certificate and gateway.key:
        https = TlsFiles.of_pair("gateway", gateway.certificate, gateway.key, config.tls)
    if gateway.planner_key_file:
        key: str | None = first_key("gateway.planner_key_file", gateway.planner_key_file)
    else:
        key = planner_key(config)
    return Access(
        https if speaks_tls(gateway.listen) else None,
        tls,
        key,
        socket_group("gateway", gateway.listen, gateway.socket_group),
    )
