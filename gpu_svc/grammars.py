"""Compiles grammars against the model's vocabulary, each once, on a thread of their own. Matching is llguidance's."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from svc_common.grammar import PARSER_LIMITS

_KEPT_GRAMMARS = 128
"""A server sees few distinct ones at a time; each takes some hundred kB."""


class GrammarError(Exception):
    """The grammar can't be kept to; the text says why."""


class Grammars:
    """Lives as long as the process. Any thread may call."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], end_token_ids: Sequence[int]) -> None:
        """`load_tokenizer` is called once, on the grammars' thread, when the first is wanted."""
        self._load_tokenizer = load_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self.end_token_ids = tuple(end_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        """Used by the compiling thread alone. The latest used last."""
        self.compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self.matching = ThreadPoolExecutor(1, "grammar-masks")

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """A matcher of its own, at the beginning of an answer. Its result raises GrammarError."""
        return self.compiler.submit(self.matcher, grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """What `compile` does, on the compiling thread."""
        first = self._compiled.get(grammar)
        if first is None:
            first = LLMatcher(self._loaded(), grammar, log_level=0, limits=PARSER_LIMITS)
            if first.is_error():
                raise GrammarError(first.get_error())
            self._compiled[grammar] = first
            if len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return first.deep_copy()

    def _loaded(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._load_tokenizer()
            except Exception as error:  # Whatever it is, answers without a grammar go on.
                raise GrammarError(f"no grammar can be kept to with the model's tokenizer: {error}") from error
        return self._tokenizer

    def close(self) -> None:
        """Ends its threads."""
        self.compiler.shutdown(cancel_futures=True)
        self.matching.shutdown(cancel_futures=True)
