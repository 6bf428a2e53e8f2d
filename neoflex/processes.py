"""One child process of a LocalStack: started, waited for, started again when it dies, ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from neoflex import child

EventSink = Callable[[str], None]
"""Told in one line what the supervisor noticed or did; called from the supervisor's threads."""


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """What to run, and where its standard output and error go."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of the supervisor's own, which wins."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often, and how soon, a child that died is started again."""

    max_restarts: int = 5
    """In a row; then the supervisor gives up. Orderly exits, with code 0, don't count."""
    first_backoff_s: float = 0.5
    max_backoff_s: float = 8.0
    stable_s: float = 60.0
    """A child that lived this long ends the row."""

    def backoff_s(self, num_restarts: int) -> float:
        return float(min(self.first_backoff_s * 2**num_restarts, self.max_backoff_s))


class SupervisedProcess:
    """A child and the thread that looks after it.

    That thread spawns the child, as the kernel ends the child with the *thread* that made it, not with the process:
    the thread lives until the child is gone for good. Until `allow_restarts`, a death is a failure to start.
    """

    def __init__(self, command: ServiceCommand, policy: RestartPolicy, on_event: EventSink) -> None:
        self.command = command
        self.failure: str | None = None
        """Why there will be no further restart."""
        self._policy = policy
        self._on_event = on_event
        self._may_restart = False
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._spawning = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=command.name, daemon=True)

    @property
    def pid(self) -> int | None:
        """None while there is no child."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        self._thread.start()

    def allow_restarts(self) -> None:
        self._may_restart = True

    def forbid_restarts(self) -> None:
        """From here on the child's end is wanted."""
        with self._spawning:
            self._stopping.set()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child, if there is one. Takes no lock: signal handlers may call it."""
        process = self._process
        if process is not None:
            process.send_signal(number)

    def join(self, timeout_s: float) -> bool:
        """Waits for the child's end after `forbid_restarts`; whether it came in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        num_restarts = 0
        while (process := self._spawn()) is not None:
            started = time.monotonic()
            code = process.wait()
            self._process = None
            if self._stopping.is_set():
                return
            ending = f"{self.command.name} {describe_exit(code)}"
            if time.monotonic() - started >= self._policy.stable_s:
                num_restarts = 0
            is_given_up = code != 0 and num_restarts == self._policy.max_restarts
            if not self._may_restart or is_given_up:
                self.failure = f"{ending} after {num_restarts} restarts" if num_restarts else ending
                return
            backoff_s = self._policy.backoff_s(num_restarts)
            if code == 0:  # Somebody told it to stop: no fault, and no limit to how often.
                self._on_event(f"{ending}; started again in {backoff_s:g} s")
            else:
                num_restarts += 1
                self._on_event(f"{ending}; restart {num_restarts} of {self._policy.max_restarts} in {backoff_s:g} s")
            if self._stopping.wait(backoff_s):
                return

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        """None once the end is wanted. The lock makes sure that no child is born after `forbid_restarts`."""
        with self._spawning, self.command.log_path.open("ab") as log:
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *self.command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.command.environment, **_without_ours(os.environ)},
                # Ctrl-C in a terminal reaches the supervisor alone, which ends the children in order.
                start_new_session=True,
            )
            return self._process


def _without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The supervisor's file says where each service listens, whatever variables are set for services elsewhere, or for
    this machine's clients."""
    return {name: value for name, value in environ.items() if not name.startswith("NEOFLEX_")}


def describe_exit(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
