"""`neoflex plan`: which execution policy fits a model to a machine."""

import typer

from neoflex.cli.simulate import run_module


def plan(context: typer.Context) -> None:
    """Say how a model is best run on a machine, from their figures alone."""
    run_module("planner_svc.advisor", context.args)
