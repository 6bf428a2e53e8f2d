"""One scripted server for the tests of the client and the command, and the command itself."""

import sys
from collections.abc import Iterator

import pytest
from support.command import Ended, Run
from support.inference import InferenceServer, inference_server

from neoflex import cli


@pytest.fixture(scope="session")
def server() -> Iterator[InferenceServer]:
    with inference_server() as running:
        yield running


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `neoflex ARGUMENT...` in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")  # As the command sets it, and leaves it.

    def run_command(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["neoflex", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run_command
