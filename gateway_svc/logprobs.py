"""Log-probabilities in the forms of both faces."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from neoflex.v1 import inference_pb2 as pb

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has not."""

Tokens = Mapping[int, pb.TokenText]
Positions = Sequence[pb.PositionLogprobs]


def token_ids_of(positions: Positions) -> list[int]:
    """All tokens whose text has to be known."""
    return [item.token_id for position in positions for item in (position.chosen, *position.top)]


def chat_logprobs(positions: Positions, tokens: Tokens) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`."""
    return [
        {**_entry(position.chosen, tokens), "top_logprobs": [_entry(item, tokens) for item in position.top]}
        for position in positions
    ]


def _entry(item: pb.TokenLogprob, tokens: Tokens) -> dict[str, Any]:
    token = tokens[item.token_id]
    written = token.text or token.special.encode()
    return {
        "token": written.decode("utf-8", "replace"),
        "logprob": max(item.logprob, _LEAST),
        "bytes": list(written),
    }


class CompletionLogprobs:
    """The `logprobs` of one choice of a completion, whose text offsets go on from piece to piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def first_of_prompt(self, token_id: int, tokens: Tokens) -> dict[str, Any]:
        """Nothing predicts the prompt's first token."""
        token = tokens[token_id]
        return {
            "tokens": [_name(token)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(token)],
        }

    def of(self, positions: Positions, tokens: Tokens) -> dict[str, Any]:
        """The likeliest of each position, and the chosen token beside them where it is none of them."""
        piece = no_logprobs()
        for position in positions:
            token, logprob = tokens[position.chosen.token_id], max(position.chosen.logprob, _LEAST)
            top = {_name(tokens[item.token_id]): max(item.logprob, _LEAST) for item in position.top}
            piece["tokens"].append(_name(token))
            piece["token_logprobs"].append(logprob)
            piece["top_logprobs"].append({**top, _name(token): logprob})
            piece["text_offset"].append(self._advance(token))
        return piece

    def _advance(self, token: pb.TokenText) -> int:
        """Where the token's text begins, in characters."""
        offset = self._offset
        self._offset += len(self._decoder.decode(token.text))
        return offset


def no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _name(token: pb.TokenText) -> str:
    """Parts of characters as OpenAI writes them, so that no two tokens have one name."""
    if token.special:
        return token.special
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)
