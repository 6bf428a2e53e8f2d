"""Where each answer stands in its grammar, and which tokens may follow: worked out while the next layers run.

After a token is drawn its sequence's matcher takes it and computes the next mask on a thread beside the executor's, so
that an iteration finds its masks ready when its logits are.
"""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.grammars import GrammarError, Grammars
from gpu_svc.packed_arrays import upload


class _State:
    """Of one answer. While `ready` is under way it alone touches the rest."""

    def __init__(self, vocab_size: int) -> None:
        self.allowed = np.zeros(vocab_size, np.bool_)
        """Tokens that may follow."""
        self.error = ""
        """Why the answer can't go on; then only end tokens are allowed."""
        self.matcher: LLMatcher | None = None
        self.ready: Future[None] = Future()


class GrammarStates:
    """By slot, for the sequences that have a grammar."""

    def __init__(self, num_slots: int, vocab_size: int, grammars: Grammars) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._ends = np.array([token for token in grammars.end_token_ids if token < vocab_size], np.int64)
        self._has_state = np.zeros(num_slots, np.bool_)
        self._states: dict[int, _State] = {}

    def insert(self, slot: int, grammar: str, answer: NDArray[np.int32]) -> None:
        """`answer` [n] is what was generated before."""
        state = _State(self._vocab_size)
        self._states[slot] = state
        self._has_state[slot] = True
        state.ready = self._grammars.compiler.submit(self._begin, state, grammar, answer.tolist())

    def release(self, slot: int) -> None:
        """Forgets the sequence in a slot; what is under way for it ends unheard."""
        self._has_state[slot] = False
        self._states.pop(slot, None)

    def rows(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places among `slots` [n] that have a grammar."""
        return np.flatnonzero(self._has_state[slots])

    def mask(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> Callable[[Tensor], None]:
        """What excludes tokens from logits, in `rows` [m] those of the sequences in `slots` [m]. Waits for masks."""
        states = [self._states[slot] for slot in slots.tolist()]
        for ready in {state.ready for state in states}:
            ready.result()
        excluded = ~np.stack([state.allowed for state in states])

        def exclude(logits: Tensor) -> None:
            index = upload(rows, logits.device)
            logits[index] = logits[index].masked_fill_(upload(excluded, logits.device), float("-inf"))

        return exclude

    def failures(self, slots: NDArray[np.int64]) -> dict[int, str]:
        """Why answers can't go on, by slot."""
        concerned = slots[self.rows(slots)].tolist()
        return {slot: self._states[slot].error for slot in concerned if self._states[slot].error}

    def take_tokens(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """One more token of each answer; slots and tokens [n]. The masks were awaited."""
        rows = self.rows(slots)
        if not len(rows):
            return
        states = [self._states[slot] for slot in slots[rows].tolist()]
        ready = self._grammars.matching.submit(self._advance, states, tokens[rows].tolist())
        for state in states:
            state.ready = ready

    # --- on the grammars' threads

    def _begin(self, state: _State, grammar: str, answer: list[int]) -> None:
        try:
            state.matcher = self._grammars.matcher(grammar)
        except GrammarError as error:
            self._fail(state, str(error))
            return
        state.matcher.consume_tokens(answer)
        self._fill(state, state.matcher)

    def _advance(self, states: list[_State], tokens: list[int]) -> None:
        for state, token in zip(states, tokens, strict=True):
            if state.matcher is not None and not state.error:
                if not state.matcher.is_stopped():
                    state.matcher.consume_token(token)
                self._fill(state, state.matcher)

    def _fill(self, state: _State, matcher: LLMatcher) -> None:
        """Sets what is allowed next. Where the grammar is at its end, that is the end tokens."""
        if matcher.is_stopped() and not matcher.is_error():
            state.allowed[:] = False
            state.allowed[self._ends] = True
            return
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, count=min(8 * len(bits), self._vocab_size), bitorder="little")
        state.allowed[: len(found)] = found
        if matcher.is_error():
            self._fail(state, matcher.get_error())
        elif not state.allowed.any():
            self._fail(state, "no token of the model continues the answer")

    def _fail(self, state: _State, error: str) -> None:
        state.error = error
        state.allowed[:] = False
        state.allowed[self._ends] = True
