"""`neoflex simulate` hands everything on to the simulator's process, and its exit code back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.machines import SPEC


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(SPEC))
    return str(path)


def simulate(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "neoflex.cli", "simulate", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_options_reach_the_simulator(spec: str) -> None:
    load = "regular:requests=4,prompt=20,output=3"
    ended = simulate("--spec", spec, "--profile", "box", "--workload", load, "--rate", "2", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    assert (found["workload"], found["rate"], found["slo"]) == (load, 2.0, 1.0)


def test_its_errors_and_its_help_come_back(spec: str) -> None:
    ended = simulate("--spec", spec, "--profile", "box", "--workload", "poisson:", "--rate", "-1")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "argument --rate/--rates: must be from 0 to 1e+06, is -1" in ended.stderr
    ended = simulate("--help")
    assert ended.returncode == 0
    assert "--find-capacity" in ended.stdout
    assert simulate().stdout == ended.stdout
