"""The `neoflex` command as an object: its subcommands, and how their errors end. Each module beside is one command."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from neoflex.cli import bench, config, demo, doctor, generate, health, model, plan, simulate, status, threads, trace, up
from neoflex.cli.output import fail
from neoflex.errors import NeoflexError
from neoflex.supervisor import StackError
from svc_common.config import ConfigError
from svc_common.model.store import ModelNotFoundError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves large language models on one GPU and the CPU beside it.",
)
app.command()(up.up)
app.command()(generate.generate)
app.command()(status.status)
app.command()(health.health)
app.command()(threads.threads)
app.command()(trace.trace)
app.command()(bench.bench)
app.command()(doctor.doctor)
app.command()(demo.demo)
app.command(context_settings=simulate.PASSED_ON)(simulate.simulate)
app.command(context_settings=simulate.PASSED_ON)(plan.plan)
app.add_typer(model.app, name="model")
app.add_typer(config.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"neoflex {version('neoflex')}")
        except PackageNotFoundError:
            typer.echo("neoflex (not installed: run from its source tree)")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The command's own options, before any subcommand."""


def run() -> None:
    """What a user can cause ends in one line and exit code 1, never in a stack trace."""
    try:
        app()
    except (NeoflexError, StackError, ModelNotFoundError, ConfigError) as error:
        fail(str(error))
