"""Streamed text against a plain reference that sees the whole answer at once."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from support import tiny_tokenizers

from planner_svc.text import AnswerText, StopMatcher
from svc_common.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())

letters = st.text(alphabet="abé🙂", max_size=40)
stop_lists = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), min_size=1, max_size=4)


def plain(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop text that is complete first, the longest of those, and that stop text."""
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@given(letters, stop_lists, st.lists(st.integers(0, 40), max_size=10))
@example("aab", ["aab", "ab"], [1])
@example("abab", ["bb", "abb", "bab"], [])
def test_stops_are_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    bounds = [0, *sorted(cuts), len(text)]
    sent = ""
    for start, end in itertools.pairwise(bounds):
        sent += matcher.push(text[start:end])
        assert plain(text, stops)[0].startswith(sent)
    assert (sent + matcher.rest(), matcher.matched) == plain(text, stops)


@given(letters, stop_lists)
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    matcher.push(text)
    held = matcher.rest()
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), stop_lists)
def test_tokens_to_text_equals_decoding_all_and_cutting(ids: list[int], stops: list[str]) -> None:
    answer = AnswerText(TOKENIZER, stops)
    sent = ""
    for token_id in ids:
        sent += answer.push(token_id)
        if answer.matched:
            break
    whole = TOKENIZER.decode(ids)
    expected, matched = plain(whole, stops)
    sent += answer.rest()
    assert answer.matched == matched
    # Half a character at the end of an answer that no stop text ended is not sent.
    assert sent == expected or (matched is None and expected == sent + "\ufffd")


def test_a_stop_across_tokens_inside_a_token_and_its_rest() -> None:
    the, abc = TOKENIZER.encode("the"), TOKENIZER.encode("abc")
    assert len(the) == len(abc) == 1
    answer = AnswerText(TOKENIZER, ["hea"])
    assert [answer.push(token) for token in (*the, *abc)] == ["t", ""]
    assert answer.matched == "hea"
    assert answer.rest() == ""
    assert answer.push(the[0]) == ""


def test_a_false_alarm_goes_out_with_what_disproves_it() -> None:
    answer = AnswerText(TOKENIZER, ["aab"])
    assert [answer.push(TOKENIZER.encode(character)[0]) for character in "aaac"] == ["", "", "a", "aac"]
    assert answer.matched is None


def test_half_a_character_is_never_sent() -> None:
    ids = [token for byte in ("🙂".encode()[:3]) for token in _ids_of(byte)]
    answer = AnswerText(TOKENIZER, [])
    assert [answer.push(token) for token in ids] == ["", "", ""]
    assert answer.rest() == ""


def _ids_of(byte: int) -> list[int]:
    return [index for index in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(index) == bytes([byte])]
