"""The real services on the real default model, and what transformers says of it."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.prompts import TEXTS, long_text
from support.reference import Reference

from neoflex.processes import RestartPolicy
from neoflex.supervisor import LocalStack
from svc_common.config import Config, parse
from svc_common.model.store import ModelFiles, default_cache_dir, resolve
from svc_common.model.tokenizer import Tokenizer, load_tokenizer

MODEL = "smollm2-135m-instruct"
LONG_PROMPT_TOKENS = 1500

StackFactory = Callable[..., LocalStack]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache, but for measured operations: those are measured once a session and shape, not at each start."""
    users, own = default_cache_dir(), tmp_path_factory.mktemp("cache") / "neoflex"
    (own / "profiles").mkdir(parents=True)
    for path in users.iterdir():
        if path.name != "profiles":
            (own / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own.parent))
        yield


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    return resolve(MODEL)


@pytest.fixture(scope="session")
def reference(files: ModelFiles) -> Reference:
    return Reference(files)


@pytest.fixture(scope="session")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return load_tokenizer(files)


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Twelve varied prompts as token ids; the last is 1,500 tokens long."""
    texts = [tokenizer.encode(text) for text in TEXTS]
    return [*texts, tokenizer.encode(long_text())[:LONG_PROMPT_TOKENS]]


@pytest.fixture
def start() -> Iterator[StackFactory]:
    """Starts the three services and waits until they are ready; all are stopped after the test.

    Called with sections: `start(gpu={"kv_bytes": "64MiB"}, planner={"mode": "auto"})`. Computes in fp32. `policy` says
    how services that die are started again.
    """
    yield from _starting()


@pytest.fixture(scope="module")
def start_module() -> Iterator[StackFactory]:
    """The same for all tests of a module."""
    yield from _starting()


def _starting() -> Iterator[StackFactory]:
    stacks: list[LocalStack] = []

    def start_stack(
        policy: RestartPolicy | None = None, **sections: dict[str, object] | list[dict[str, object]]
    ) -> LocalStack:
        run_dir = Path(tempfile.mkdtemp(prefix="nfx-"))
        stack = LocalStack(stack_config(run_dir, **sections), run_dir, policy=policy)
        stacks.append(stack)
        stack.start()
        stack.wait_ready(120)
        return stack

    yield start_stack
    for stack in stacks:
        stack.stop()


def stack_config(run_dir: Path, **sections: dict[str, object] | list[dict[str, object]]) -> Config:
    segments = run_dir / "shm"
    segments.mkdir()
    values: dict[str, Any] = {
        "model": {"source": MODEL},
        "planner": {"listen": "127.0.0.1:0"},
        "gpu": {"device": "cpu", "dtype": "fp32"},
        "cpu_attn": {},
    }
    for name, section in sections.items():
        if isinstance(section, list):
            values[name] = section
        else:
            values.setdefault(name, {}).update(section)
    return parse(values, "test")
