"""Turns a request's tokens into text that may be sent: whole characters, and never part of a stop text."""

from collections.abc import Sequence

from svc_common.model.tokenizer import IncrementalDecoder, Tokenizer


class AnswerText:
    """The text of one answer, token by token. Cost per token does not grow with the answer."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopMatcher(stops) if stops else None

    def push(self, token_id: int) -> str:
        """Text that is certain by now; after a match, nothing more."""
        text = self._decoder.push(token_id)
        return self._stops.push(text) if self._stops and text else text

    @property
    def matched(self) -> str | None:
        """The stop text that has appeared."""
        return self._stops.matched if self._stops else None

    def rest(self) -> str:
        """What was held back, for an answer that ends for another reason. Half a character is dropped."""
        return self._stops.rest() if self._stops else ""


class StopMatcher:
    """Finds the stop text that is complete first (of several complete at once, the longest) in a stream of text.

    Each stop text keeps how many of its characters the text ends with (Knuth-Morris-Pratt), so that the outcome
    does not depend on how the stream is cut, and each character costs constant time per stop text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings."""
        # Longest first: it wins where several are complete at the same character.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matching = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is certain by now: what cannot become a stop text, or what stands before the matched one."""
        if self.matched is not None:
            return ""
        text = self._held + text
        for index in range(len(self._held), len(text)):
            stop = self._advance(text[index])
            if stop is not None:
                self.matched = stop
                self._held = ""
                return text[: index + 1 - len(stop)]
        certain = len(text) - max(self._matching)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """What was held back."""
        return self._held

    def _advance(self, character: str) -> str | None:
        """Takes one character; returns the stop text it completes."""
        found = None
        for number, stop in enumerate(self._stops):
            matching = self._matching[number]
            while matching and stop[matching] != character:
                matching = self._borders[number][matching - 1]
            if stop[matching] == character:
                matching += 1
            if matching == len(stop):
                found = found or stop
                matching = self._borders[number][matching - 1]
            self._matching[number] = matching
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders
