"""What `make compose` does where there is a Docker daemon, and where none can be had."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "with_docker.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Stand-ins for those that the script would call."""
    directory = tmp_path / "programs"
    directory.mkdir()
    for name in ("docker", "dockerd", "mmdebstrap", "apt-get"):
        _make(directory / name, "exit 1")
    return directory


def _make(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def run(programs: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **environ}
    return subprocess.run(["bash", SCRIPT, *command], env=environment, capture_output=True, text=True, check=False)


def test_without_a_daemon_it_says_so_and_is_no_failure(programs: Path) -> None:
    done = run(programs, "echo", "tested")
    assert done.returncode == 0
    assert done.stdout == "NOT TESTED: the compose stack: no Docker daemon (build/docker/start_daemon.log)\n"


def test_with_a_daemon_the_command_runs_and_its_code_counts(programs: Path) -> None:
    _make(programs / "docker", 'case "$*" in info) ;; "compose version --short") echo 2.26.1 ;; *) exit 1 ;; esac')
    done = run(programs, "sh", "-c", 'echo "${COMPOSE-docker compose}"; exit 3')
    assert (done.returncode, done.stdout) == (3, "docker compose\n")


def test_a_compose_of_the_callers_is_taken(programs: Path) -> None:
    _make(programs / "docker", '[ "$*" = info ]')
    done = run(programs, "sh", "-c", "echo $COMPOSE", COMPOSE="/some/compose")
    assert (done.returncode, done.stdout) == (0, "/some/compose\n")
