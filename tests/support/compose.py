"""The stack of compose/ in a Docker daemon, under a project name of its own."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import docker
from docker.models.containers import Container

from svc_common.model.store import default_cache_dir

ROOT = Path(__file__).parents[2]
COMPOSE_DIR = ROOT / "compose"
SERVICES = ("model", "cpu-attn", "gpu", "planner", "gateway")
_PROJECT_LABEL = "com.docker.compose.project"
_POLL_S = 0.1


def compose(*arguments: str, files: tuple[Path, ...], environ: Mapping[str, str]) -> str:
    """What Compose 2 prints; an AssertionError with its complaint where it fails."""
    program = shlex.split(os.environ.get("COMPOSE", "docker compose"))
    named = [part for file in files for part in ("--file", str(file))]
    done = subprocess.run(
        [*program, *named, *arguments], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"compose {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
    return done.stdout


def until(holds: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(_POLL_S)


class ComposeStack:
    """Ports are free ones; the model comes from this host's cache, read-only."""

    def __init__(self, directory: Path, settings: str) -> None:
        """`directory`: for files of this test alone. `settings`: what stands in for neoflex.toml."""
        self.project = f"neoflex-test-{os.getpid()}"
        self.docker = docker.from_env()
        self.grpc_port, self.http_port = _free_port(), _free_port()
        self.settings, override = directory / "test.toml", directory / "test.json"
        self.settings.write_text(settings)
        self.settings.chmod(0o644)  # The containers' user reads it.
        override.write_text(json.dumps(_override(self.settings)))
        self._files = (COMPOSE_DIR / "docker-compose.yaml", override)
        self._environ = {
            "COMPOSE_PROJECT_NAME": self.project,
            "GRPC_PORT": str(self.grpc_port),
            "HTTP_PORT": str(self.http_port),
            "IMAGE_TAG": "test",
            "CPU_ATTN_CPUS": "1.5",
            **({"TORCH_INDEX_URL": ""} if _has_torch_wheel() else {}),
        }

    def compose(self, *arguments: str, override: str | None = None, environ: Mapping[str, str] | None = None) -> str:
        """`override`: one of those beside docker-compose.yaml, and what it wants of the environment."""
        files = (*self._files, COMPOSE_DIR / f"{override}.yaml") if override else self._files
        return compose(*arguments, files=files, environ={**self._environ, **(environ or {})})

    def container(self, service: str) -> Container:
        """As it is now, one that has ended included."""
        labels = [f"{_PROJECT_LABEL}={self.project}", f"com.docker.compose.service={service}"]
        (found,) = self.docker.containers.list(all=True, filters={"label": labels})
        return found

    def run(self, service: str, *argv: str) -> str:
        """A command in a running container; its standard output and error."""
        code, output = self.container(service).exec_run(list(argv))
        text = output.decode()
        assert code == 0, f"{service}: {' '.join(argv)}: {code}: {text}"
        return str(text)

    def crash(self, service: str) -> None:
        """SIGKILL to the service's process, from inside: to Docker that is a crash. Returns once it has restarted."""
        before = self.container(service).attrs["RestartCount"]
        self.container(service).exec_run(["sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)"])
        until(lambda: self.container(service).attrs["RestartCount"] == before + 1, 30, f"a restart of {service}")

    def num_regions(self) -> int:
        """That cpu-attn has made since the stack came up: one for each epoch in which it is attached."""
        return int(self.container("cpu-attn").logs().count(b" blocks, "))

    def leftovers(self) -> list[str]:
        """What the daemon still has of this project."""
        label = {"label": f"{_PROJECT_LABEL}={self.project}"}
        return [
            *(container.name for container in self.docker.containers.list(all=True, filters=label)),
            *(network.name for network in self.docker.networks.list(filters=label)),
            *(volume.name for volume in self.docker.volumes.list(filters=label)),
        ]


def _has_torch_wheel() -> bool:
    """In compose/wheels: this host's of torch for CPUs, where pip is configured to find one outside of an index."""
    wheels = COMPOSE_DIR / "wheels"
    (torch,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    if not any(wheels.glob(f"{torch.replace('==', '-')}*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--dest", str(wheels), torch], capture_output=True, check=False)
    return any(wheels.glob(f"{torch.replace('==', '-')}*.whl"))


def _override(settings: Path) -> dict[str, object]:
    models = f"{default_cache_dir() / 'models'}:/var/cache/neoflex/models:ro"
    services: dict[str, dict[str, object]] = {name: {} for name in SERVICES}
    for name, service in services.items():
        if name != "gateway":
            service["volumes"] = [models]
        if name != "model":
            service["healthcheck"] = {"interval": "2s"}  # Each waits for the one before it.
    return {"services": services, "configs": {"neoflex": {"file": str(settings)}}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
