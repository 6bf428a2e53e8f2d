"""A real Prometheus on loopback, and its promtool; `tools/prometheus.sh` says where they come from."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

_START_S = 30.0


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_program("promtool"), *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def _program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"no {name}: `make observability` brings it"
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; fails with what Prometheus says."""
        answer = httpx2.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expr: str) -> float | None:
        """Of an expression with one series, now; None where there is none."""
        found = self.get("query", query=expr)["result"]
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None


@contextmanager
def running_prometheus(config: Path) -> Iterator[Prometheus]:
    """Its data lies beside the configuration."""
    listen = f"127.0.0.1:{free_port()}"
    log = config.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                _program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={config.parent / 'data'}",
                f"--web.listen-address={listen}",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        server = Prometheus(f"http://{listen}")
        deadline = time.monotonic() + _START_S
        while not _is_ready(server):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()


def _is_ready(server: Prometheus) -> bool:
    try:
        return httpx2.get(f"{server.url}/-/ready", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False
