"""What is noticed of a service that stands still, and what is written down of it."""

import asyncio
import logging
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stacks import until

from svc_common.config import LoggingConfig
from svc_common.watchdog import Watchdog

NEVER_S = 600.0
"""For event loops that are merely busy."""


class Watched:
    """Stands still as long as the test says."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.answers = "neighbour: well"
        self.stalls = 0
        self.looks = 0
        self.report_threads: list[threading.Thread] = []

    def stall(self) -> str | None:
        self.looks += 1
        return self.reason

    def report(self) -> str:
        self.report_threads.append(threading.current_thread())
        return "3 requests run"

    async def ask(self) -> str:
        return self.answers

    def note_stall(self) -> None:
        self.stalls += 1


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It looks often, and leaves the signal as it was."""
    monkeypatch.setattr("svc_common.watchdog._LOOK_EVERY_S", 0.02)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def watchdog(watched: Watched, directory: Path | None, stall_s: float = NEVER_S) -> Watchdog:
    config = LoggingConfig(dump_dir=directory)
    return Watchdog("some_svc", watched, stall_s, config, watched.note_stall)


def dumps(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.dump"))


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """The message; the test's own time limit is the only one."""
    while True:
        found = [message for message in caplog.messages if text in message]
        if found:
            return found[-1]
        await asyncio.sleep(0.01)


async def test_a_stall_is_written_down_once(watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dog = watchdog(watched, tmp_path)
    dog.start()
    watched.reason = "nothing has moved for 9 s"
    message = await until_logged(caplog, "nothing has moved")
    [path] = dumps(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"nothing has moved for 9 s; state: (also in {path})\n" in message
    text = path.read_text()
    assert text.rstrip() == message.partition("\n")[2]
    head, state, report, others, answers, threads, *stacks = text.splitlines()
    assert head.startswith(f"some_svc, process {os.getpid()}, ")
    assert (state, report) == ("== state", "3 requests run")
    assert (others, answers) == ("== other services", "neighbour: well")
    assert threads == "== threads, the last call first"
    assert any("asyncio" in line and "_run_once" in line for line in stacks)
    assert watched.report_threads == [threading.main_thread()]
    # As long as it lasts there is no other; the next one is another.
    watched.reason, looks = "still nothing", watched.looks
    await asyncio.to_thread(until, lambda: watched.looks > looks + 3)
    assert not [message for message in caplog.messages if "still nothing" in message]
    watched.reason = None
    await until_logged(caplog, "it moves again")
    watched.reason = "nothing again"
    await until_logged(caplog, "nothing again")
    assert watched.stalls == 2
    dog.stop()


async def test_an_event_loop_that_stands_still_is_noticed(
    watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svc_common.watchdog._ANSWER_S", 0.1)
    dog = watchdog(watched, None, 0.2)
    dog.start()
    await asyncio.sleep(0)
    until(lambda: bool(caplog.messages))  # Blocks the loop, as a scheduler that never ends would.
    message = caplog.messages[0]
    assert re.match(r"the event loop has not turned for \d+\.\d s; state:\n", message)
    assert "== state, of an event loop that does not answer\n3 requests run\n" in message
    assert "test_an_event_loop_that_stands_still_is_noticed" in message
    assert watched.stalls == 1
    dog.stop()


async def test_a_signal_asks_for_it_any_time(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dog = watchdog(watched, tmp_path)
    watched.answers = ""
    dog.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    message = await until_logged(caplog, "SIGUSR1 asks")
    assert "== other services" not in message
    assert len(dumps(tmp_path)) == 1
    assert watched.stalls == 0
    assert caplog.records[-1].levelno == logging.WARNING
    dog.stop()
    os.kill(os.getpid(), signal.SIGUSR1)  # Does no harm.


async def test_a_directory_that_is_not_there_costs_the_file_alone(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dog = watchdog(watched, tmp_path / "nowhere")
    dog.start()
    watched.reason = "stuck"
    message = await until_logged(caplog, "stuck")
    assert "can't be written: No such file or directory" in message
    assert "3 requests run" in message
    dog.stop()


async def test_a_look_that_fails_is_not_the_last(
    watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str | None:
        raise RuntimeError("Set changed size during iteration")

    monkeypatch.setattr(watched, "stall", fail)
    dog = watchdog(watched, None)
    dog.start()
    await until_logged(caplog, "the watchdog can't look")
    monkeypatch.undo()
    monkeypatch.setattr("svc_common.watchdog._LOOK_EVERY_S", 0.02)
    watched.reason = "nothing moves"
    await until_logged(caplog, "nothing moves; state:")
    dog.stop()


async def test_a_report_that_fails_leaves_the_stacks(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> str:
        raise KeyError("what is not there")

    watched.report = broken  # type: ignore[method-assign]
    dog = watchdog(watched, None)
    dog.start()
    watched.reason = "stuck"
    message = await until_logged(caplog, "stuck; state")
    assert "== state unknown: KeyError('what is not there')" in message
    assert "== threads" in message
    dog.stop()
