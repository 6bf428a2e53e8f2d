"""`neoflex threads`: how many threads attend on the CPU, shown and changed live."""

from typing import Annotated

import typer

from neoflex import threads as client
from neoflex.cli.arguments import CaFile, CertificateFile, KeyFile, ServerName, UseTls, access_of, check_address
from neoflex.cli.output import out
from svc_common.config import CpuAttnConfig

_TIMEOUT_S = 5.0
# Does not fit int32, or is no number of threads on any machine; the service names its own limit.
_MOST = 2**16


def _check_addresses(addresses: str) -> str:
    for address in addresses.split(","):
        check_address(address.strip())
    return addresses


_ADDRESS = typer.Option(
    help="cpu_attn_svc, host:port or unix:path; several, as in the environment, separated by commas.",
    envvar="NEOFLEX_CPU_ATTN_LISTEN",
    callback=_check_addresses,
)


def threads(
    wanted: Annotated[
        int | None, typer.Argument(metavar="NUMBER", min=1, max=_MOST, help="From now on. Without it: shows them.")
    ] = None,
    address: Annotated[str, _ADDRESS] = str(CpuAttnConfig.model_fields["listen"].default),
    index: Annotated[int, typer.Option(min=0, help="Which one, where --address has several.")] = 0,
    tls: UseTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
) -> None:
    """Show or change how many threads of a CPU attention service compute, without a pause.

    Of a service of `neoflex up` the address is in config.toml of its run directory. With cpu_attn.elastic the planner
    changes the number again as it sees fit.
    """
    addresses = [part.strip() for part in address.split(",")]
    if index >= len(addresses):
        raise typer.BadParameter(f"must be from 0 to {len(addresses) - 1}, is {index}", param_hint="--index")
    access = access_of(tls, ca_file, certificate_file, key_file, server_name)
    found = client.threads(addresses[index], wanted, _TIMEOUT_S, access)
    out.print(f"{found.num_threads} of at most {found.max_threads}")
