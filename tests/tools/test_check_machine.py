"""What `make` says on a machine that lacks something."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "check_machine.sh"


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", SCRIPT, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_a_machine_that_has_all_is_let_through() -> None:
    done = check(sys.executable)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_compiler_is_named() -> None:
    done = check(sys.executable, CXX="/nonexistent/c++")
    assert done.returncode == 1
    assert done.stderr == "missing: a C++20 compiler\n    Debian/Ubuntu: apt-get install g++; or set CXX\n"


def test_a_missing_python_is_named() -> None:
    done = check("/nonexistent/python3")
    assert done.returncode == 1
    assert done.stderr.startswith("missing: Python 3.11 or newer\n")
    assert "python3-venv python3-dev" in done.stderr


def test_the_interpreter_to_use_is_printed() -> None:
    assert check("--python", sys.executable).stdout == f"{sys.executable}\n"
