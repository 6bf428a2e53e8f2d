"""How `neoflex up` speaks on standard error: for people, or, where the services' logs are JSON, an object a line."""

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, Protocol

from rich.text import Text

from neoflex.cli.output import STARTING, err, fail, starting

_NAME_CHARS = len("cpu_attn_svc")
_COLOURS = {"planner_svc": "cyan", "gpu_svc": "green", "cpu_attn_svc": "yellow", "gateway_svc": "magenta"}
_SELF = "neoflex up"


class Spinner(Protocol):
    """While the services start."""

    def update(self, status: str) -> None: ...


class Voice(Protocol):
    def say(self, text: str, *, markup: bool = False) -> None:
        """A line of the command's own. `markup`: rich's."""

    def note(self, text: str) -> None:
        """What the supervisor did or noticed. Called from its threads."""

    def log(self, service: str, line: str, name_width: int) -> None:
        """A line of a service's log; names take up to `name_width` characters."""

    def starting(self) -> AbstractContextManager[Spinner]:
        """Until the services are ready."""

    def fail(self, text: str) -> NoReturn:
        """Says what went wrong and exits."""


class PlainVoice:
    def say(self, text: str, *, markup: bool = False) -> None:
        err.print(text, markup=markup, soft_wrap=True)

    def note(self, text: str) -> None:
        err.print(text, style="bold", markup=False, soft_wrap=True)

    def log(self, service: str, line: str, name_width: int) -> None:
        # In one piece: a spinner's redraw wipes out what has not yet come to the end of its line.
        colour = _COLOURS[service.partition("-")[0]]
        text = Text.assemble((f"{service:>{max(_NAME_CHARS, name_width)}}", colour), f" | {line}")
        err.print(text, soft_wrap=True)

    def starting(self) -> AbstractContextManager[Spinner]:
        return starting()

    def fail(self, text: str) -> NoReturn:
        fail(text)


class _Still:
    def update(self, status: str) -> None:
        """Nothing turns in a log."""


class JsonVoice:
    """Services' lines go through as they are; what is none of their log, a native crash's last words say, is put into
    an object of that service."""

    def say(self, text: str, *, markup: bool = False) -> None:
        self._write(_SELF, "INFO", (Text.from_markup(text).plain if markup else text).strip())

    def note(self, text: str) -> None:
        self._write(_SELF, "WARNING", text)

    def log(self, service: str, line: str, name_width: int) -> None:
        if _is_object(line):
            sys.stderr.write(f"{line}\n")
        elif line:
            self._write(service, "ERROR", line)

    def starting(self) -> AbstractContextManager[Spinner]:
        self.say(STARTING)
        return nullcontext(_Still())

    def fail(self, text: str) -> NoReturn:
        self._write(_SELF, "CRITICAL", text)
        raise SystemExit(1)

    def _write(self, service: str, level: str, message: str) -> None:
        """With the keys of svc_common.logs."""
        now_s = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s % 1 * 1000):03d}Z"
        values = {"time": stamp, "level": level, "service": service, "logger": "stderr", "message": message}
        sys.stderr.write(json.dumps(values) + "\n")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
