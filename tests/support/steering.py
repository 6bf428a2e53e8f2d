"""A stack of the real services whose planner a test tells where layers shall run, while it serves.

`python steering.py CONFIG DIRECTORY` is the real planner with a hand on its lever: it changes to the policy in
DIRECTORY/wanted.json, and keeps in DIRECTORY/runs.json the one that the executor says runs now.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

from neoflex.supervisor import LocalStack
from planner_svc.__main__ import describe
from planner_svc.server import PlannerServer
from svc_common import config as configuration
from svc_common.config import parse
from svc_common.grpc_server import StopSignal
from svc_common.logs import configure_logging
from svc_common.model.read_spec import read_spec
from svc_common.model.store import resolve
from svc_common.policy import ExecutionPolicy

_POLL_S = 0.02
_CHANGE_S = 60.0


class SteeredStack:
    """The test's side."""

    def __init__(self, stack: LocalStack, directory: Path) -> None:
        self.stack = stack
        self._directory = directory

    def ask(self, policy: ExecutionPolicy) -> None:
        """Whatever runs now, this from the next epoch on."""
        _write(self._directory / "wanted.json", list(astuple(policy)))

    def until_runs(self, policy: ExecutionPolicy) -> None:
        deadline = time.monotonic() + _CHANGE_S
        while (runs := _read(self._directory / "runs.json")) != list(astuple(policy)):
            assert time.monotonic() < deadline, f"{runs} runs, not {policy}"
            time.sleep(_POLL_S)


@contextmanager
def steered_stack(**sections: dict[str, object]) -> Iterator[SteeredStack]:
    """Ready to serve. Begins with a partition of decodes, whose tables then hold for every policy."""
    run_dir = Path(tempfile.mkdtemp(prefix="nfx-"))
    values: dict[str, dict[str, object]] = {
        "model": {},
        "planner": {"listen": "127.0.0.1:0", "decode_policy": "partition", "cpu_layers": 1},
        "gpu": {"device": "cpu", "dtype": "fp32", "profile": "always"},
        "cpu_attn": {},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    values["planner"]["prefill_policy"] = "offload"
    argv = (sys.executable, __file__, str(run_dir / "config.toml"), str(run_dir))
    with LocalStack(parse(values, "test"), run_dir, argv={"planner_svc": argv}) as stack:
        stack.wait_ready(120)
        yield SteeredStack(stack, run_dir)


def _write(path: Path, value: object) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    os.replace(part, path)


def _read(path: Path) -> object:
    return json.loads(path.read_text()) if path.exists() else None


async def _steer(server: PlannerServer, directory: Path) -> None:
    loop, epochs = server._loop, server._loop._epochs
    wanted: object = None
    runs: object = None
    while True:
        await asyncio.sleep(_POLL_S)
        if loop.placement is None or not server._engine.is_ready():
            continue
        if epochs._tables.of_both is None:
            # Of operations on both processors: what PolicyKeeper measures at the start where not all layers fit.
            epochs._tables.of_both = epochs._tables.tables(epochs.policy)
        now = list(astuple(loop.placement.policy)) if loop.placement.policy else None
        if now != runs:
            _write(directory / "runs.json", runs := now)
        if (asked := _read(directory / "wanted.json")) != wanted:
            wanted = asked
            loop.change_policy(ExecutionPolicy(*asked))  # type: ignore[misc]


async def _serve(path: Path, directory: Path) -> None:
    config = configuration.load(path)
    configure_logging("planner_svc", config.logging)
    files = resolve(config.model.source)
    stop = StopSignal()
    server = PlannerServer(config, describe(config, files, read_spec(files)))
    await server.start()
    steering = asyncio.create_task(_steer(server, directory))
    await stop.wait()
    steering.cancel()
    await server.stop(30)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), Path(sys.argv[2])))
