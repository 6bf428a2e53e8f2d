"""Where services listen: addresses apart, and what stands open."""

from collections.abc import Iterator
from pathlib import Path

from neoflex.doctor.finding import Finding, Level
from neoflex.placement import shared_address
from svc_common.config import Config, GatewayConfig, PlannerConfig
from svc_common.security.exposure import exposure


def addresses(config: Config, root: Path) -> Iterator[Finding]:
    """Of the services that this configuration starts."""
    if complaint := shared_address(config):
        yield Finding(Level.PROBLEM, "addresses", "not all different", complaint)
        return
    yield Finding(Level.OK, "addresses", "all different")


def access(config: Config, root: Path) -> Iterator[Finding]:
    """What stands open without a check of who calls."""
    has_tls = config.tls is not None
    doors: list[tuple[str, PlannerConfig | GatewayConfig, bool]] = [("planner", config.planner, has_tls)]
    if gateway := config.gateway:
        doors.append(("gateway", gateway, has_tls or gateway.certificate is not None))
    found = [
        (key, exposure(door.listen, tls, bool(door.api_keys_file or door.client_certificates)))
        for key, door, tls in doors
    ]
    found.append(("gpu", exposure(config.gpu.listen, has_tls, has_tls)))
    for index, service in enumerate(config.cpu_attn_services):
        found.append((config.cpu_attn_key(index), exposure(service.listen, has_tls, has_tls)))
    for key, complaint in found:
        if complaint:
            yield Finding(Level.NOTE, "access", f"{key}.listen: {complaint}", "see docs/security.md")
    if not any(complaint for _, complaint in found):
        yield Finding(Level.OK, "access", "no address is open to the network without a check of who calls")
