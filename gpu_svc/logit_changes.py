"""Penalties and biases: changes single logits of the sequences that ask for it, before temperature and filters.

A sequence that asks has a row of entries, one for each token that it has seen or that is biased: sparse, as answers
are short beside a vocabulary. Sequences that ask for nothing have no row and cost nothing.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.packed_arrays import upload
from svc_common.plan import Sampling

_ROW_ARRAYS = ("_num", "_presence", "_frequency", "_repetition", "_follows")
_ENTRY_ARRAYS = ("_tokens", "_counts", "_seen", "_biases")


class LogitChanges:
    """Rows of entries by slot. Entries of a row are of distinct tokens, the first `_num` of them are valid."""

    def __init__(self, num_slots: int) -> None:
        self._row_of_slot = np.full(num_slots, -1, np.int64)
        self._free_rows: list[int] = []
        self._num = np.zeros(0, np.int64)
        self._presence = np.zeros(0, np.float32)
        self._frequency = np.zeros(0, np.float32)
        self._repetition = np.ones(0, np.float32)
        self._follows = np.zeros(0, np.bool_)
        """Whether tokens yet to come matter."""
        self._tokens = np.zeros((0, 64), np.int64)
        self._counts = np.zeros((0, 64), np.float32)
        """How often the answer so far contains the token."""
        self._seen = np.zeros((0, 64), np.bool_)
        """Whether prompt or answer contain the token. Kept only with a repetition penalty."""
        self._biases = np.zeros((0, 64), np.float32)

    def insert(self, slot: int, sampling: Sampling, token_ids: NDArray[np.int32], num_generated_tokens: int) -> None:
        """`token_ids` [n] are the prompt and then the answer so far."""
        if not (sampling.has_penalties or sampling.logit_bias):
            return
        biased = np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)
        answer = token_ids[len(token_ids) - num_generated_tokens :] if sampling.has_penalties else token_ids[:0]
        context = token_ids if sampling.repetition_penalty != 1 else token_ids[:0]
        tokens = np.unique(np.concatenate([biased, answer, context]))
        row = self._take_row(len(tokens))
        self._row_of_slot[slot] = row
        self._num[row] = len(tokens)
        self._presence[row] = sampling.presence_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._repetition[row] = sampling.repetition_penalty
        self._follows[row] = sampling.has_penalties
        for name in _ENTRY_ARRAYS:
            getattr(self, name)[row, : len(tokens)] = 0
        self._tokens[row, : len(tokens)] = tokens
        np.add.at(self._counts[row], np.searchsorted(tokens, answer), 1)
        self._seen[row, np.searchsorted(tokens, context)] = True
        self._biases[row, np.searchsorted(tokens, biased)] = [bias for _, bias in sampling.logit_bias]

    def release(self, slot: int) -> None:
        """Forgets the sequence in a slot."""
        row = int(self._row_of_slot[slot])
        if row >= 0:
            self._row_of_slot[slot] = -1
            self._free_rows.append(row)

    def take_tokens(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Counts one more token of each answer; slots and tokens [n]."""
        rows = self._row_of_slot[slots]
        concerned = np.flatnonzero(rows >= 0)
        concerned = concerned[self._follows[rows[concerned]]]
        if not len(concerned):
            return
        rows, tokens = rows[concerned], tokens[concerned]
        width = int(self._num[rows].max())
        same = (self._tokens[rows, :width] == tokens[:, None]) & (np.arange(width) < self._num[rows, None])
        is_new = ~same.any(axis=1)
        places = np.where(is_new, self._num[rows], same.argmax(axis=1) if width else 0)
        self._widen(width + 1)
        new_rows, new_places = rows[is_new], places[is_new]
        for name in _ENTRY_ARRAYS:
            getattr(self, name)[new_rows, new_places] = 0
        self._tokens[new_rows, new_places] = tokens[is_new]
        self._num[new_rows] += 1
        self._counts[rows, places] += 1
        self._seen[rows, places] = True

    def rows(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places among `slots` [n] whose logits change."""
        return np.flatnonzero(self._row_of_slot[slots] >= 0)

    def apply_(self, logits: Tensor, slots: NDArray[np.int64]) -> None:
        """logits [n, vocab_size], fp32, dense, of the sequences in `slots` [n]; in place.

        Repetition as in CTRL (Keskar et al. 2019, section 4.1), over prompt and answer; then frequency and presence
        as OpenAI's API defines them, over the answer; then biases.
        """
        places = self.rows(slots)
        rows = self._row_of_slot[slots[places]]
        width = int(self._num[rows].max(initial=0))
        row, entry = np.nonzero(np.arange(width) < self._num[rows, None])
        if not len(row):
            return
        device, of_table = logits.device, rows[row]
        index = upload(places[row] * logits.shape[1] + self._tokens[of_table, entry], device)
        counts = self._counts[of_table, entry]
        seen = self._seen[of_table, entry] & (self._repetition[of_table] != 1)
        factor, taken, bias = (
            upload(values.astype(np.float32), device)
            for values in (
                np.where(seen, self._repetition[of_table], 1),
                self._frequency[of_table] * counts + self._presence[of_table] * (counts > 0),
                self._biases[of_table, entry],
            )
        )
        flat = logits.view(-1)
        values = flat[index]
        values = torch.where(values > 0, values / factor, values * factor)
        flat[index] = values.sub_(taken).add_(bias)

    def _take_row(self, num_entries: int) -> int:
        if not self._free_rows:
            size = len(self._num)
            for name in (*_ROW_ARRAYS, *_ENTRY_ARRAYS):
                old = getattr(self, name)
                more = np.zeros((max(4, size), *old.shape[1:]), old.dtype)
                setattr(self, name, np.concatenate([old, more]))
            self._free_rows = list(range(len(self._num) - 1, size - 1, -1))
        self._widen(num_entries)
        return self._free_rows.pop()

    def _widen(self, num_entries: int) -> None:
        """Makes room for so many entries in a row."""
        width = self._tokens.shape[1]
        if num_entries <= width:
            return
        more = max(width, num_entries - width)
        for name in _ENTRY_ARRAYS:
            setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))
