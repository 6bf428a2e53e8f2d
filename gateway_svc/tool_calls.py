"""Finds the calls of tools in an answer, in the format of the model's family, piece by piece as it is generated.

Text that turns out to be no call of a tool that was offered is content: nothing is ever lost.
"""

from collections.abc import Collection
from typing import Protocol

from gateway_svc.call_scanner import CallArguments, CallScanner, CallStart, Content, Piece
from neoflex.v1 import inference_pb2 as pb

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL_MARK = "[TOOL_CALLS]"


class AnswerParser(Protocol):
    """Text in, pieces out."""

    def push(self, text: str) -> list[Piece]: ...
    def end(self) -> list[Piece]:
        """What was held back, when the answer is over."""


class PlainParser:
    """An answer without calls."""

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def end(self) -> list[Piece]:
        return []


class ForcedParser:
    """An answer that is the arguments of one tool, as its constraint says."""

    def __init__(self, name: str) -> None:
        self._first: list[Piece] = [CallStart(0, name)]

    def push(self, text: str) -> list[Piece]:
        pieces = [*self._first, CallArguments(0, text)] if text else []
        if text:
            self._first = []
        return pieces

    def end(self) -> list[Piece]:
        return []


class HermesParser:
    """Text, with calls between <tool_call> and </tool_call>; white space beside a call belongs to it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._num_calls = 0
        self._held = ""
        self._scanner: CallScanner | None = None
        self._before = ""
        """What stands before the brace with which the scanner's call begins."""
        self._after_call = False
        """Its end is still to come."""
        self._beside_call = False
        """White space that comes now belongs to the call."""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            before = self._held
            step = self._in_call if self._scanner else self._behind_call if self._after_call else self._outside
            pieces += step()
            if self._held == before:
                break
        return pieces

    def end(self) -> list[Piece]:
        text = self._held
        if self._scanner and not self._scanner.started:
            text = self._before + self._scanner.raw + text
        return [Content(text)] if text.strip() or (text and not self._num_calls) else []

    def _outside(self) -> list[Piece]:
        if self._beside_call:
            self._held = self._held.lstrip()
            self._beside_call = not self._held
        content, mark, rest = self._held.partition(_OPEN)
        if mark:
            self._held = rest
            self._scanner = CallScanner(self._num_calls, self._names)
            text = content.rstrip()
            self._before = content[len(text) :] + mark
            return [Content(text)] if text else []
        certain = len(self._held) - _overlap(self._held, _OPEN)
        certain = len(self._held[:certain].rstrip())
        content, self._held = self._held[:certain], self._held[certain:]
        return [Content(content)] if content else []

    def _in_call(self) -> list[Piece]:
        scanner = self._scanner
        assert scanner is not None
        pieces, self._held = scanner.push(self._held)
        if scanner.failed:
            pieces.append(Content(self._before + scanner.raw))
            self._scanner = None
        elif scanner.done:
            self._num_calls += 1
            self._scanner = None
            self._after_call = self._beside_call = True
        return pieces

    def _behind_call(self) -> list[Piece]:
        rest = self._held.lstrip()
        if rest.startswith(_CLOSE):
            self._held = rest.removeprefix(_CLOSE)
            self._after_call = False
        elif rest and not _CLOSE.startswith(rest):  # Left out.
            self._held = rest
            self._after_call = False
        return []


class WholeAnswerParser:
    """An answer that is calls and nothing else, or none: a JSON array of them, or one after another."""

    def __init__(self, names: Collection[str], *, in_array: bool) -> None:
        self._names = names
        self._in_array = in_array
        self._separators = " \t\r\n,]" if in_array else " \t\r\n;"
        self._num_calls = 0
        self._held = ""
        self._scanner: CallScanner | None = None
        self._before = ""
        """What stands before the brace with which the scanner's call begins."""
        self._is_content = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and not self._is_content:
            if self._scanner is None and not self._begin():
                break
            if self._scanner is not None:
                pieces += self._in_call(self._scanner)
        if self._is_content and self._held:
            pieces.append(Content(self._held))
            self._held = ""
        return pieces

    def end(self) -> list[Piece]:
        text = self._held
        if self._scanner and not self._scanner.started:
            text = self._before + self._scanner.raw + text
        is_rest = self._num_calls > 0 and not text.strip(self._separators)
        return [] if is_rest or not text else [Content(text)]

    def _begin(self) -> bool:
        """Whether it is certain by now what follows: a call, or content."""
        rest = self._held.lstrip()
        if self._num_calls:
            rest = self._held.lstrip(self._separators)
        elif self._in_array:
            if not rest or (len(rest) < len(_MISTRAL_MARK) and _MISTRAL_MARK.startswith(rest)):
                return False
            rest = rest.removeprefix(_MISTRAL_MARK).lstrip()
            if rest and rest[0] != "[":
                self._is_content = True
                return True
            rest = rest[1:].lstrip()
        if not rest:
            return False
        if rest[0] == "{":
            self._scanner = CallScanner(self._num_calls, self._names)
        else:
            self._is_content = True
        return True

    def _in_call(self, scanner: CallScanner) -> list[Piece]:
        if not scanner.raw:
            self._before, brace, rest = self._held.partition("{")
            self._held = brace + rest
        pieces, self._held = scanner.push(self._held)
        if scanner.failed:
            self._held = self._before + scanner.raw + self._held
            self._is_content = True
            self._scanner = None
        elif scanner.done:
            self._num_calls += 1
            self._scanner = None
        return pieces


def make_parser(call_format: int, names: Collection[str]) -> AnswerParser:
    """For an answer that may hold calls; `call_format` is one of pb.ToolCallFormat that is specified."""
    match call_format:
        case pb.TOOL_CALL_FORMAT_HERMES:
            return HermesParser(names)
        case pb.TOOL_CALL_FORMAT_MISTRAL:
            return WholeAnswerParser(names, in_array=True)
        case pb.TOOL_CALL_FORMAT_LLAMA_JSON:
            return WholeAnswerParser(names, in_array=False)
        case _:
            raise ValueError(f"no parser for tool-call format {call_format}")


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
