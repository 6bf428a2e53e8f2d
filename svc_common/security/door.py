"""What stands between a gRPC server and its callers, by the configuration."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from svc_common.config import Config, ConfigError, CpuAttnConfig
from svc_common.security.api_keys import ApiKeys
from svc_common.security.exposure import exposure
from svc_common.security.sockets import group_id, open_to_group, private_files
from svc_common.security.tls import TlsFiles, speaks_tls

_INNER_STREAMS = 128
_SPARE_STREAMS = 256
"""Beside requests, and so that those too many are refused rather than kept waiting by the transport."""


@dataclass(frozen=True, slots=True)
class Door:
    """By default: whoever reaches the address may call; a Unix socket is its user's own."""

    tls: TlsFiles | None = None
    """For an address with a port."""
    client_certificates: bool = False
    """Whether TLS demands one."""
    keys: ApiKeys | None = None
    socket_group: int | None = None
    max_streams: int = _INNER_STREAMS
    """Calls of one connection at a time."""

    def open(self, server: grpc.aio.Server, listen: str) -> int:
        """Takes the address; returns its port. Raises RuntimeError where it can't be had, and ConfigError."""
        if not speaks_tls(listen):
            with private_files():
                server.add_insecure_port(listen)
            open_to_group(Path(listen.removeprefix("unix:")), self.socket_group)
            return 0
        if self.tls is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, self.tls.server_credentials(self.client_certificates))

    def exposure(self, address: str) -> str:
        """What is open about the address, or nothing."""
        asks_who = self.keys is not None or (self.client_certificates and self.tls is not None)
        return exposure(address, self.tls is not None, asks_who)


def planner_door(config: Config, tls: TlsFiles | None) -> Door:
    """Raises ConfigError."""
    planner = config.planner
    return Door(
        tls,
        planner.client_certificates,
        ApiKeys("planner.api_keys_file", planner.api_keys_file) if planner.api_keys_file else None,
        socket_group("planner", planner.listen, planner.socket_group),
        planner.max_waiting_requests + planner.max_running_sequences + _SPARE_STREAMS,
    )


def gpu_door(config: Config, tls: TlsFiles | None) -> Door:
    """Raises ConfigError."""
    return Door(tls, True, None, socket_group("gpu", config.gpu.listen, config.gpu.socket_group))


def cpu_attn_door(service: CpuAttnConfig, key: str, tls: TlsFiles | None) -> Door:
    """`key`: how messages name the service's table. Raises ConfigError."""
    return Door(tls, True, None, socket_group(key, service.listen, service.socket_group))


def socket_group(section: str, listen: str, group: str | None) -> int | None:
    """Raises ConfigError."""
    if group is None:
        return None
    if speaks_tls(listen):
        raise ConfigError(f"{section}.socket_group has no effect: {section}.listen is {listen}, no Unix socket")
    return group_id(f"{section}.socket_group", group)
