"""LocalStacks whose services are stand-ins, for tests of the supervision itself."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neoflex.supervisor import LocalStack
from svc_common.config import parse

STAND_IN = Path(__file__).with_name("stand_in.py")


def stand_in_stack(run_dir: Path, diary: Path, listen: str, **options: Any) -> LocalStack:
    def argv(name: str, *more: str) -> tuple[str, ...]:
        return (sys.executable, str(STAND_IN), name, str(diary), *more)

    commands = {
        "planner_svc": argv("planner_svc", listen),
        "gpu_svc": argv("gpu_svc"),
        "cpu_attn_svc": argv("cpu_attn_svc"),
        **options.pop("argv", {}),
    }
    values: dict[str, object] = {"planner": {"listen": listen}}
    if gateway := options.pop("gateway", None):  # The real one.
        values["gateway"] = gateway
    if logging := options.pop("logging", None):
        values["logging"] = logging
    config = parse(values, "test")
    return LocalStack(config, run_dir, argv=commands, **options)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what must happen sooner or later; a minute is for ever."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process does anything still; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def own_environment() -> dict[str, str]:
    """For child processes that import what the tests import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
