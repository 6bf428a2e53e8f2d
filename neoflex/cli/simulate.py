"""`neoflex simulate`: a workload on a machine that need not exist, decided by the scheduler that serves."""

import os
import subprocess
import sys
from typing import NoReturn

import typer

from neoflex import child

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""The program reads its options itself."""


def simulate(context: typer.Context) -> None:
    """Simulate the scheduler on a machine and a workload, without either."""
    run_module("planner_svc.simulator", context.args)


def run_module(name: str, arguments: list[str]) -> NoReturn:
    """Runs a program of the services, with --help where it is given nothing, and ends with its exit code."""
    program = [sys.executable, "-m", name, *(arguments or ["--help"])]
    # Another process: this package reaches the services' code no other way. It ends with this one.
    starter = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
    try:
        code = subprocess.run([*starter, *program], check=False).returncode
    except KeyboardInterrupt:  # The program got it too.
        code = 130
    raise typer.Exit(code)
