"""What more than one command checks in its arguments; what is wrong with them is a usage error."""

from typing import Annotated

import typer

from svc_common.config import checked_address


def check_address(address: str | None) -> str | None:
    """gRPC takes an address without a port for one on port 443, and would say that nobody listens there."""
    try:
        return None if address is None else checked_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


ServerAddress = Annotated[str, typer.Option(help="Server, host:port or unix:path.", callback=check_address)]


def check_prompt(prompt: str, *, raw: bool = False) -> None:
    """A model answers nothing, too, with whatever comes to it. Blanks alone are a prompt only as raw text."""
    if not (prompt if raw else prompt.strip()):
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
