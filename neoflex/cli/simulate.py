"""`neoflex simulate`: a workload on a machine that need not exist, decided by the scheduler that serves."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from neoflex import child

_POLICY = typer.Option(help="neoflex, neo, gpu-only (chunks of 512), gpu-only-knee, gpu-only-slo (our rules, no host).")
_CAPACITY = typer.Option(min=0, max=1, help="Search the highest rate at which this share of the requests is in time.")


def simulate(
    spec: Annotated[Path, typer.Option(help="JSON file of machine profiles and models.")],
    profile: Annotated[str, typer.Option(help="Which machine of it.")],
    workload: Annotated[Path, typer.Option(help="Requests: [[arrival, prompt, output], ...], or a recorded trace.")],
    rate: Annotated[float, typer.Option(min=0, help="Requests per second; 0: all at once, without targets.")] = 1.0,
    policy: Annotated[str, _POLICY] = "neoflex",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.", show_default="all")] = None,
    find_capacity: Annotated[float | None, _CAPACITY] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate the scheduler on a machine and a workload, without either."""
    options = ["--spec", str(spec), "--profile", profile, "--workload", str(workload)]
    options += ["--rate", str(rate), "--policy", policy]
    if limit is not None:
        options += ["--limit", str(limit)]
    if find_capacity is not None:
        options += ["--find-capacity", str(find_capacity)]
    if as_json:
        options.append("--json")
    program = [sys.executable, "-m", "planner_svc.simulator", *options]
    # Another process: this package reaches the services' code no other way. It ends with this one.
    starter = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
    raise typer.Exit(subprocess.run([*starter, *program], check=False).returncode)
