"""Reads one call of a tool, {"name": ..., "arguments": {...}}, as it is generated, character by character."""

import json
from collections.abc import Collection
from dataclasses import dataclass

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of this function begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments


class CallScanner:
    """Nothing is given out before the name is known to be a tool's; until then the text can still turn out to be none.

    What stands between braces is passed on as it is: a model may write arguments that are no JSON, as with OpenAI.
    """

    def __init__(self, index: int, names: Collection[str]) -> None:
        self.raw = ""
        """All that was read."""
        self.done = False
        """Its last brace has been read."""
        self.failed = False
        """It is no call of a tool; `raw` is plain text."""
        self.started = False
        """Its name was given out."""
        self._index = index
        self._names = names
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._token_at = 0
        """Where in `raw` the latest string at the top level, or the value of the arguments, begins."""
        self._key: str | None = None
        self._in_value = False
        self._name: str | None = None
        self._in_arguments = False
        self._quoted_arguments = False
        self._has_arguments = False
        self._pending = ""

    def push(self, text: str) -> tuple[list[Piece], str]:
        """What is certain by now, and the text behind the call's end."""
        for position, character in enumerate(text):
            self._take(character)
            if self.done or self.failed:
                return self._pieces(), text[position + 1 :]
        return self._pieces(), ""

    def _take(self, character: str) -> None:
        at = len(self.raw)
        self.raw += character
        if self._in_string:
            self._take_in_string(character)
        elif not self._closers:
            if character == "{":
                self._closers.append("}")
            elif character not in _SPACE:
                self.failed = True
        elif character in "}]" and character != self._closers[-1]:
            self.failed = not self.started
            self.done = self.started
        else:
            self._take_between_strings(character, at)

    def _take_in_string(self, character: str) -> None:
        if self._in_arguments:
            self._pending += character
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if len(self._closers) == 1:
                self._end_top_string()

    def _end_top_string(self) -> None:
        if self._in_arguments:
            return
        try:
            value = json.loads(self.raw[self._token_at :], strict=False)
        except ValueError:
            self.failed = not self.started
            return
        if not self._in_value:
            self._key = value
        elif self._key == "name" and self._name is None:
            self._name = value
            self.failed = value not in self._names

    def _take_between_strings(self, character: str, at: int) -> None:
        top = len(self._closers) == 1
        if top and character in ",}":
            self._end_value()
        if top and self._in_value and self._key in _ARGUMENTS and not self._has_arguments and character not in _SPACE:
            self._in_arguments = self._has_arguments = True
            self._quoted_arguments = character == '"'
        if self._in_arguments:
            self._pending += character
        if character == '"':
            self._in_string, self._token_at = True, at
        elif character in "{[":
            self._closers.append("}" if character == "{" else "]")
        elif character in "}]":
            self._closers.pop()
            self.done = not self._closers
            self.failed = self.done and self._name is None
        elif top and character == ":":
            self._in_value = True

    def _end_value(self) -> None:
        if self._in_arguments:
            self._pending = self._pending.rstrip()
            if self._quoted_arguments:  # Some models write them as OpenAI sends them: JSON within a string.
                self._pending = _unquoted(self._pending)
                self._quoted_arguments = False
        self._in_arguments = self._in_value = False

    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self.failed or self._name is None:
            return pieces
        if not self.started:
            self.started = True
            pieces.append(CallStart(self._index, self._name))
        if self.done and not self._has_arguments:
            self._pending = "{}"
        # White space is held back: it may stand behind the arguments.
        certain = "" if self._quoted_arguments else self._pending.rstrip()
        if certain:
            pieces.append(CallArguments(self._index, certain))
            self._pending = self._pending[len(certain) :]
        return pieces


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return text
