"""What more than one command checks in its arguments; what is wrong with them is a usage error."""

from pathlib import Path
from typing import Annotated

import typer

from neoflex import access
from neoflex.access import Access, Tls
from neoflex.client import Client
from svc_common.config import ConfigError, checked_address
from svc_common.security.api_keys import first_key


def check_address(address: str | None) -> str | None:
    """gRPC takes an address without a port for one on port 443, and would say that nobody listens there."""
    try:
        return None if address is None else checked_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


ServerAddress = Annotated[str, typer.Option(help="Server, host:port or unix:path.", callback=check_address)]


UseTls = Annotated[
    bool, typer.Option("--tls", help=f"Speak TLS, by public CAs unless --ca-file names others; or {access.TLS}=1.")
]
CaFile = Annotated[
    Path | None, typer.Option(help="CAs that the server's certificate may come from, PEM.", show_default=access.CA_FILE)
]
CertificateFile = Annotated[
    Path | None, typer.Option(help="Client certificate, PEM.", show_default=access.CERTIFICATE_FILE)
]
KeyFile = Annotated[Path | None, typer.Option(help="Its private key, PEM.", show_default=access.KEY_FILE)]
ServerName = Annotated[
    str | None, typer.Option(help="Name that the server's certificate must be for.", show_default=access.SERVER_NAME)
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="File whose first line is the API key.", show_default=access.API_KEY)
]


def access_of(
    tls: bool,
    ca_file: Path | None,
    certificate_file: Path | None,
    key_file: Path | None,
    server_name: str | None,
    api_key_file: Path | None = None,
) -> Access:
    """What the options say, and the environment where they say nothing."""
    key = None
    if api_key_file is not None:
        try:
            key = first_key("--api-key-file", api_key_file)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
    known = Access.of(None, key)
    if not (tls or ca_file or certificate_file or key_file or server_name):
        return known
    others = known.tls or Tls()
    return Access(
        Tls(
            ca_file or others.ca_file,
            certificate_file or others.certificate_file,
            key_file or others.key_file,
            server_name or others.server_name,
        ),
        known.api_key,
    )


def connect(address: str, access: Access) -> Client:
    """Shows what `access` holds, and nothing else. Raises AccessError."""
    return Client(address, tls=access.tls or False, api_key=access.api_key or "")


def check_prompt(prompt: str, *, raw: bool = False) -> None:
    """A model answers nothing, too, with whatever comes to it. Blanks alone are a prompt only as raw text."""
    if not (prompt if raw else prompt.strip()):
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
