"""A stack that was built from this checkout and brought up, for all tests of a module."""

import time
from collections.abc import Iterator

import pytest
from support.compose import ComposeStack

SETTINGS = """
[model]
source = "smollm2-135m-instruct"
[planner]
max_sequence_tokens = 512
max_running_sequences = 8
[gpu]
dtype = "fp32"
kv_bytes = "28MiB" # 600 tokens: of the streams below two are there at a time, the others on the host
[cpu_attn]
kv_bytes = "128MiB"
segment_dir = "/run/neoflex/segments"
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    stack = ComposeStack(tmp_path_factory.mktemp("compose"), SETTINGS)
    try:
        _timed("build", stack, "build", "model")
        _timed("up", stack, "up", "--detach", "--wait", "--wait-timeout", "180", "--no-build")
        yield stack
    except BaseException:
        print(stack.compose("logs", "--no-color", "--tail", "40"))
        raise
    finally:
        stack.compose("down", "--volumes", "--timeout", "20")


def _timed(what: str, stack: ComposeStack, *arguments: str) -> None:
    started = time.monotonic()
    stack.compose(*arguments)
    print(f"compose {what}: {time.monotonic() - started:.0f} s")
