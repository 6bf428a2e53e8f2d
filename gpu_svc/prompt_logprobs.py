"""Log-probabilities of a prompt's own tokens, from the hidden states of its chunks."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gpu_svc.sequences import SequenceTable
from svc_common.decoder.decoder import Decoder
from svc_common.plan import PromptLogprobs, SubBatch

PIECE_TOKENS = 64
"""Logits of a whole chunk would take more memory than many a KV cache: 2,048 tokens of 128,000 take a GB."""


def prompt_logprobs(
    sub_batch: SubBatch, hidden: Tensor, table: SequenceTable, decoder: Decoder
) -> Iterator[tuple[int, PromptLogprobs]]:
    """Of the chunks whose sequences ask for it. hidden [n, hidden_size] is the sub-batch's after the last layer."""
    row = 0
    for chunk in sub_batch.prefills:
        slot = table.slot_of[chunk.sequence_id]
        num_top = int(table.sampling.num_prompt_logprobs[slot])
        # Token i is predicted at i - 1; what follows the prompt's last token is the answer.
        targets = table.prompts[slot][chunk.start + 1 : min(chunk.start + chunk.num_tokens + 1, table.answer_at[slot])]
        if num_top >= 0 and len(targets):
            rows = hidden[row : row + len(targets)]
            yield chunk.sequence_id, _of_chunk(chunk.start + 1, rows, targets.astype(np.int64), num_top, decoder)
        row += chunk.num_tokens


def _of_chunk(start: int, hidden: Tensor, targets: np.ndarray, num_top: int, decoder: Decoder) -> PromptLogprobs:
    chosen: list[float] = []
    top_ids: list[int] = []
    top_values: list[float] = []
    for first in range(0, len(targets), PIECE_TOKENS):
        piece = targets[first : first + PIECE_TOKENS]
        logprobs = torch.log_softmax(decoder.logits(hidden[first : first + len(piece)]), dim=-1)
        chosen += logprobs.gather(1, torch.from_numpy(piece).to(logprobs.device)[:, None])[:, 0].tolist()
        if num_top:
            values, ids = torch.topk(logprobs, min(num_top, logprobs.shape[1]), dim=-1)
            top_ids += ids.flatten().tolist()
            top_values += values.flatten().tolist()
    return PromptLogprobs(start, tuple(chosen), tuple(top_ids), tuple(top_values))
