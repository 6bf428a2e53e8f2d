"""`neoflex health`: whether one service is well, as an exit code for health checks."""

from typing import Annotated

import typer

from neoflex.cli.arguments import (
    CaFile,
    CertificateFile,
    KeyFile,
    ServerName,
    UseTls,
    access_of,
    check_address,
)
from neoflex.cli.output import fail, out
from neoflex.health import READINESS, complaint


def _check_address(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        check_address(address)
    return address


_ADDRESS = typer.Argument(
    help="Any service's host:port or unix:path, or the gateway's http[s]://host:port.", callback=_check_address
)


def health(
    address: Annotated[str, _ADDRESS],
    service: Annotated[
        str, typer.Option(help='"readiness", "liveness", or a service\'s full gRPC name; "": the whole server.')
    ] = READINESS,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=0.01)] = 2.0,
    tls: UseTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
) -> None:
    """Ask one service whether it is well: exit code 0, or 1 and why it is not."""
    found = complaint(address, service, timeout, access_of(tls, ca_file, certificate_file, key_file, server_name))
    if found is not None:
        fail(found)
    out.print("ok")
