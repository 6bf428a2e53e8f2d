"""`neoflex config`: what may stand in the configuration, and whether a file is one."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from neoflex.cli.output import err, out
from neoflex.doctor import Level
from neoflex.doctor.files import file_troubles
from neoflex.placement import to_toml
from svc_common.config import Config, load
from svc_common.config.reference import reference

app = typer.Typer(no_args_is_help=True, help="Check, print and explain the configuration.")

File = Annotated[Path, typer.Argument(help="TOML file of a server.", show_default=False)]


@app.command()
def check(file: File) -> None:
    """Say whether a file can be used, and what it names: certificates, keys, directories. Exit code 1 where not, with
    each bad key. `neoflex doctor` asks the machine.
    """
    troubles = [*file_troubles(load(file))]
    for item in troubles:
        err.print(f"{file}: {item.advice}", soft_wrap=True, markup=False)
    if any(item.level is Level.PROBLEM for item in troubles):
        raise typer.Exit(1)
    if not troubles:
        out.print(f"{file}: fine", soft_wrap=True, markup=False)


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file of a server; default: none.", show_default=False)
    ] = None,
) -> None:
    """Print a configuration with all defaults, as TOML."""
    sys.stdout.write(to_toml(Config() if file is None else load(file)))


@app.command(name="reference")
def print_reference() -> None:
    """Print every key with its type, limits and default, as Markdown: docs/configuration.md."""
    sys.stdout.write(reference())
