"""Notices that a service stands still and writes down what it was doing: once a stall, and whenever SIGUSR1 comes.

A thread of its own looks, so that an event loop that no longer turns is noticed as well.
"""

import asyncio
import faulthandler
import logging
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from svc_common.config import LoggingConfig

_LOOK_EVERY_S = 1.0
_ANSWER_S = 3.0
"""For the event loop to make a report, what other services are asked included."""

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """A service as its watchdog sees it. Nothing here may tell what prompts or answers say."""

    def stall(self) -> str | None:
        """What does not move though it should; None: all is well. Called from the watchdog's thread."""

    def report(self) -> str:
        """What it does and holds. On the event loop's thread, or on the watchdog's where that loop stands still."""

    async def ask(self) -> str:
        """What the services that it depends on say of themselves; empty where there are none."""


class Watchdog:
    """Started and stopped on the event loop that it watches."""

    def __init__(
        self,
        service: str,
        watched: Watched,
        stall_s: float,
        config: LoggingConfig,
        on_stall: Callable[[], None] = lambda: None,
    ) -> None:
        """An event loop that has not turned for `stall_s` seconds stands still. `on_stall`: told once of each stall."""
        self._service = service
        self._watched = watched
        self._stall_s = stall_s
        self._directory = config.dump_dir
        self._on_stall = on_stall
        self._wakes: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What woke the thread: a signal's name, or nothing to end it. Signal handlers may put into it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_turn_s = 0.0
        self._is_stalled = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last_turn_s = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, lambda number, frame: self._wakes.put(signal.Signals(number).name))
        self._thread.start()

    def stop(self) -> None:
        """Looks no more; SIGUSR1 does nothing from here on."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._wakes.put("")

    def _run(self) -> None:
        every_s = min(_LOOK_EVERY_S, self._stall_s / 4)
        while True:
            try:
                if not (wake := self._wakes.get(timeout=every_s)):
                    return
            except queue.Empty:
                wake = ""
            try:
                if wake:
                    self._dump(f"{wake} asks", logging.WARNING)
                self._look()
            except Exception:
                assert self._loop is not None
                if self._loop.is_closed():  # Without a word.
                    return
                logger.exception("the watchdog can't look")

    def _look(self) -> None:
        assert self._loop is not None
        stands_s = time.monotonic() - self._last_turn_s
        self._loop.call_soon_threadsafe(self._note_turn)
        reason = self._watched.stall()
        if stands_s > self._stall_s:
            reason = f"the event loop has not turned for {stands_s:.1f} s"
        if reason and not self._is_stalled:
            self._on_stall()
            self._dump(reason, logging.ERROR)
        elif self._is_stalled and not reason:
            logger.warning("it moves again")
        self._is_stalled = reason is not None

    def _note_turn(self) -> None:
        self._last_turn_s = time.monotonic()

    # --- what is written down

    def _dump(self, reason: str, level: int) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        text = "\n".join(
            [
                f"{self._service}, process {os.getpid()}, {stamp}: {reason}",
                *self._reports(),
                "== threads, the last call first",
                _stacks(),
            ]
        )
        logger.log(level, "%s\n%s", f"{reason}; state:{self._write(stamp, text)}", text)

    def _reports(self) -> list[str]:
        """Made by the event loop or, where it does not answer in time, without it."""

        async def gather() -> list[str]:
            found = ["== state", self._watched.report()]
            if answers := await self._watched.ask():
                found += ["== other services", answers]
            return found

        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(gather(), self._loop)
        try:
            return future.result(_ANSWER_S)
        except TimeoutError:
            future.cancel()
        except Exception as error:
            logger.exception("the state can't be reported")
            return [f"== state unknown: {error!r}"]
        try:
            return ["== state, of an event loop that does not answer", self._watched.report()]
        except Exception as error:  # It changes after all while it is read.
            return [f"== state unknown: {error!r}"]

    def _write(self, stamp: str, text: str) -> str:
        """Into a file of its own, where there is a directory for it; how the log names that."""
        if self._directory is None:
            return ""
        path = self._directory / f"{self._service}-{os.getpid()}-{stamp}.dump"
        try:
            _write_private(path, text)
        except OSError as error:
            return f" ({path} can't be written: {error.strerror})"
        return f" (also in {path})"


def _write_private(path: Path, text: str) -> None:
    """For its owner alone; of two in one second the later one stands."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")


def _stacks() -> str:
    """Of all threads of Python, by faulthandler, which needs a real file."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().rstrip()
