"""Clients in Node, Go and C++, made from the protos alone, against the real services and against a scripted one."""

import subprocess
from pathlib import Path

from clients.conftest import ForeignClient
from support.inference import InferenceServer
from support.stacks import until

from neoflex import Client
from neoflex.supervisor import LocalStack

_PROMPT = "Name three planets."
_LARGE_BYTES = 5 * 2**20
"""Beyond gRPC's default of 4 MiB a message."""


def test_the_answer_is_the_one_that_python_gets(client: ForeignClient, stack: LocalStack) -> None:
    with Client(stack.address) as python:
        messages = [{"role": "user", "content": _PROMPT}]
        expected = python.generate(messages=messages, temperature=0.0, max_tokens=24)
    ended = client.run("--temperature", "0", "--max-tokens", "24", stack.address, _PROMPT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == expected.text
    assert f"{expected.usage.prompt_tokens} tokens in" in ended.stderr
    assert f"{expected.usage.completion_tokens} tokens out: FINISH_REASON_" in ended.stderr


def test_leaving_early_frees_the_blocks(client: ForeignClient, stack: LocalStack) -> None:
    ended = client.run("--cancel-after", "3", "--max-tokens", "1000", stack.address, _PROMPT)
    assert ended.returncode == 0, ended.stderr
    assert "cancelled after" in ended.stderr
    with Client(stack.address) as python:

        def is_empty() -> bool:
            load = python.load()
            return load.running_requests == load.gpu_blocks_used == load.host_blocks_used == 0

        until(is_empty)


def test_messages_beyond_four_mebibytes_go_both_ways(
    client: ForeignClient, scripted: InferenceServer, tmp_path: Path
) -> None:
    text = "The keeper lit the lamp and looked out at the sea.\n"
    text *= _LARGE_BYTES // len(text) + 1
    file = tmp_path / "large.txt"
    file.write_text(text)
    ended = client.run("--round-trip", str(file), scripted.address)
    assert ended.returncode == 0, ended.stderr
    # The scripted server makes a token of each letter.
    assert ended.stdout == f"{len(text)} bytes, {len(text)} tokens, the same text\n"


def test_errors_say_what_is_wrong_with_which_field(client: ForeignClient, scripted: InferenceServer) -> None:
    ended = client.run("--raw", scripted.address, "malformed")
    assert ended.returncode == 1
    assert "reason: BAD_FIELD" in ended.stderr
    assert "field request.sampling.top_p: must be in (0, 1], is 3" in ended.stderr


def test_overload_says_when_to_come_back(client: ForeignClient, scripted: InferenceServer) -> None:
    ended = client.run("--raw", scripted.address, "too many")
    assert ended.returncode == 1
    assert "the queue is full" in ended.stderr
    assert "reason: QUEUE_FULL" in ended.stderr
    assert "try again in 1.5 s" in ended.stderr


def test_quiet_streams_live_until_their_deadline(foreign: dict[str, ForeignClient], scripted: InferenceServer) -> None:
    """All three at once: longer than two pings of 10 s, which a server with gRPC's defaults answers with GOAWAY."""
    waiting = {
        name: each.start("--raw", "--timeout", "25", scripted.address, "never") for name, each in foreign.items()
    }
    for name, process in waiting.items():
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1, name
        assert out == "a ", name
        assert "deadline" in err.replace("_", "").lower(), (name, err)
        assert "too_many_pings" not in err.lower(), (name, err)


def test_buf_calls_the_server_by_reflection(stack: LocalStack) -> None:
    buf = ["buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    url = f"http://{stack.address}/neoflex.v1.InferenceService"
    done = subprocess.run([*buf, f"{url}/GetModelInfo"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"name": "smollm2-135m-instruct"' in done.stdout
    request = '{"request": {"text": "Once upon", "stopping": {"maxTokens": 3}, "sampling": {"temperature": 0}}}'
    done = subprocess.run([*buf, "-d", request, f"{url}/GenerateStream"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "FINISH_REASON_LENGTH" in done.stdout
