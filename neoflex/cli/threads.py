"""`neoflex threads`: how many threads attend on the CPU, shown and changed live."""

from typing import Annotated

import typer

from neoflex import threads as client
from neoflex.access import Access
from neoflex.channel import DEFAULT_ADDRESS
from neoflex.cli.arguments import (
    ApiKeyFile,
    CaFile,
    CertificateFile,
    KeyFile,
    ServerName,
    UseTls,
    access_of,
    check_address,
    connect,
)
from neoflex.cli.output import fail, out

_TIMEOUT_S = 5.0
# Does not fit int32, or is no number of threads on any machine; the service names its own limit.
_MOST = 2**16


def _check_addresses(addresses: str | None) -> str | None:
    for address in addresses.split(",") if addresses else ():
        check_address(address.strip())
    return addresses


_ADDRESS = typer.Option(
    help="cpu_attn_svc itself, host:port or unix:path; several, as in the environment, separated by commas.",
    envvar="NEOFLEX_CPU_ATTN_LISTEN",
    callback=_check_addresses,
    show_default="what the planner says",
)
_PLANNER = typer.Option(help="Server whose services are meant, host:port or unix:path.", callback=check_address)


def threads(
    wanted: Annotated[
        int | None, typer.Argument(metavar="NUMBER", min=1, max=_MOST, help="From now on. Without it: shows them.")
    ] = None,
    address: Annotated[str | None, _ADDRESS] = None,
    planner: Annotated[str, _PLANNER] = DEFAULT_ADDRESS,
    index: Annotated[int, typer.Option(min=0, help="Which one, where there are several.")] = 0,
    tls: UseTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Show or change how many threads of a CPU attention service compute, without a pause.

    The planner of the server that runs here says where its services are. With cpu_attn.elastic it changes the number
    again as it sees fit.
    """
    access = access_of(tls, ca_file, certificate_file, key_file, server_name, api_key_file)
    addresses = [part.strip() for part in address.split(",")] if address else _addresses_of(planner, access)
    if index >= len(addresses):
        raise typer.BadParameter(f"must be from 0 to {len(addresses) - 1}, is {index}", param_hint="--index")
    found = client.threads(addresses[index], wanted, _TIMEOUT_S, access)
    out.print(f"{found.num_threads} of at most {found.max_threads}")


def _addresses_of(planner: str, access: Access) -> tuple[str, ...]:
    with connect(planner, access) as server:
        addresses = server.server_info().cpu_attention_addresses
    if not addresses:
        fail(f"{planner} runs without a CPU attention service: cpu_attn.kv_bytes is 0")
    return addresses
