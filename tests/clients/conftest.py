"""The clients of examples/, built as their README says, and the servers they talk to."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.rpc import status_pb2
from support.inference import InferenceServer, inference_server

from neoflex.supervisor import LocalStack
from svc_common.config import parse

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOGLE_PROTOS = Path(status_pb2.__file__).parents[2]
LANGUAGES = ("node", "go", "cpp")


@dataclass(frozen=True)
class ForeignClient:
    """One built client."""

    argv: tuple[str, ...]

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, "NEOFLEX_GOOGLE_PROTOS": str(GOOGLE_PROTOS)}
        pipe = subprocess.PIPE
        return subprocess.Popen([*self.argv, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout}\n{done.stderr}"


def _build_node(out: Path) -> ForeignClient:
    shutil.copytree(EXAMPLES / "node", out / "examples" / "node", ignore=shutil.ignore_patterns("node_modules"))
    (out / "proto").symlink_to(EXAMPLES.parent / "proto")
    _run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(out / "examples" / "node"))
    return ForeignClient(("node", str(out / "examples" / "node" / "chat.js")))


def _build_go(out: Path) -> ForeignClient:
    _run("sh", str(EXAMPLES / "go" / "build.sh"), str(out))
    return ForeignClient((str(out / "chat"),))


def _build_cpp(out: Path) -> ForeignClient:
    _run("cmake", "-S", str(EXAMPLES / "cpp"), "-B", str(out), f"-DGOOGLE_PROTOS={GOOGLE_PROTOS}")
    _run("cmake", "--build", str(out))
    return ForeignClient((str(out / "chat"),))


_BUILDERS: dict[str, Callable[[Path], ForeignClient]] = {"node": _build_node, "go": _build_go, "cpp": _build_cpp}


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ForeignClient]:
    """By language."""
    return {language: _BUILDERS[language](tmp_path_factory.mktemp(language)) for language in LANGUAGES}


@pytest.fixture(params=LANGUAGES)
def client(request: pytest.FixtureRequest, foreign: dict[str, ForeignClient]) -> ForeignClient:
    return foreign[request.param]


@pytest.fixture(scope="session")
def scripted() -> Iterator[InferenceServer]:
    with inference_server() as server:
        yield server


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """The real services with the default model."""
    run_dir = Path(tempfile.mkdtemp(prefix="nfx-"))
    segments = run_dir / "shm"
    segments.mkdir()
    config = parse(
        {
            "model": {"source": "smollm2-135m-instruct"},
            "planner": {"listen": "127.0.0.1:0"},
            "gpu": {"device": "cpu", "dtype": "fp32", "profile": "always", "kv_bytes": "64MiB"},
            "cpu_attn": {"kv_bytes": "64MiB", "segment_dir": str(segments)},
        },
        "test",
    )
    running = LocalStack(config, run_dir)
    try:
        running.start()
        running.wait_ready(120)
        yield running
    finally:
        running.stop()
