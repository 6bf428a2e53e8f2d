"""`neoflex doctor`: what this machine lacks for a configuration."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from neoflex.cli.output import out
from neoflex.doctor import Finding, Level, examine
from svc_common.config import Config, load

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


def doctor(
    config_file: Annotated[Path | None, typer.Option("--config", help="TOML file of the server to be.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each finding.")] = False,
) -> None:
    """Check this machine for a configuration, and say what to change; exit code 1 where it would not run."""
    config = Config() if config_file is None else load(config_file)
    findings = [*examine(config)]
    if as_json:
        for item in findings:
            fields = {"level": item.level.value, "topic": item.topic, "found": item.found, "advice": item.advice}
            sys.stdout.write(json.dumps(fields) + "\n")
    else:
        out.print(_table(findings))
    if any(item.level is Level.PROBLEM for item in findings):
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("what")
    table.add_column("found, and what to change", overflow="fold")
    for item in findings:
        style = _STYLES[item.level]
        text = Text(item.found)
        if item.advice:
            text.append(f"\n{item.advice}", style=style)
        table.add_row(Text(item.level.value, style=style), item.topic, text)
    return table
