"""`sample` on a GPU: by Triton's kernels, and the host waits once, for the tokens."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from gpu_svc.packed_arrays import upload
from gpu_svc.philox import uniforms
from gpu_svc.sampling import Change, Drawn, RowLogprobs, SamplingRows, gather_logprobs, row_logprobs
from gpu_svc.triton_kernels.sampling import cut_kernel, mass_kernel, pick_kernel

_RUN_TOKENS = 256
_RUNS = 8
"""Of a program that adds up weights."""
_CUT_TILE, _CUT_WARPS = 4096, 16
"""One program reads a whole row again and again: with so many warps some compute while others wait for memory."""


def sample_on_device(logits: Tensor, rows: SamplingRows, changes: Sequence[Change] = ()) -> Drawn:
    """As `sample`; also on the CPU's tensors, with TRITON_INTERPRET=1."""
    device = logits.device
    raw_maxima, best = logits.max(dim=-1)
    maxima = raw_maxima
    wanting = np.flatnonzero(rows.num_logprobs >= 0)
    raw: Tensor | None = None
    if len(wanting):
        wanted = upload(wanting, device)
        raw = logits[wanted]
    for change in changes:
        change.apply_(logits)
    if changes:
        maxima, best = logits.max(dim=-1)
    tokens = draw(logits, raw_maxima, maxima, best, rows)
    if raw is None:
        return _drawn(tokens.cpu().numpy(), ())
    width = min(int(rows.num_logprobs.max()), logits.shape[1])
    parts = gather_logprobs(raw, tokens[wanted].clamp_(min=0), width)
    # In one piece: float64 holds tokens and fp32 exactly.
    packed = torch.cat([part.to(torch.float64).flatten() for part in (tokens, *parts)]).cpu()
    ends = np.cumsum([len(tokens), len(wanting), len(wanting) * width])
    host_tokens, chosen, ids, values = np.split(packed.numpy(), ends)
    places = np.flatnonzero(host_tokens[wanting] >= 0)
    return _drawn(
        host_tokens.astype(np.int64),
        row_logprobs(
            wanting[places],
            chosen[places],
            ids.reshape(-1, width).astype(np.int64)[places],
            values.reshape(-1, width)[places],
            rows,
        ),
    )


def _drawn(tokens: np.ndarray, logprobs: tuple[RowLogprobs, ...]) -> Drawn:
    """Of tokens [n], -1 where there were no numbers."""
    return Drawn(np.maximum(tokens, 0), logprobs, np.flatnonzero(tokens < 0))


def draw(logits: Tensor, raw_maxima: Tensor, maxima: Tensor, best: Tensor, rows: SamplingRows) -> Tensor:
    """Tokens [n], int64, of logits [n, vocab_size], fp32, dense; -1 where `raw_maxima` [n] is not finite.

    `maxima` and `best` [n], int64, are each row's largest logit and its place. Waits for nothing.
    """
    device, (num_rows, vocab_size) = logits.device, logits.shape
    num_runs = -(-vocab_size // _RUN_TOKENS)
    with np.errstate(divide="ignore"):
        columns = (rows.temperature, rows.top_k, rows.top_p, np.log(rows.min_p), uniforms(rows.seed, rows.draw))
    parameters = upload(np.stack(columns, axis=1, dtype=np.float64), device)
    is_drawn = rows.temperature > 0
    has_cuts = bool((is_drawn & ((rows.top_k > 0) | (rows.top_p < 1))).any())
    cuts = torch.empty(num_rows, dtype=torch.int32, device=device)
    masses = torch.empty((num_rows, num_runs), dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if has_cuts:
        cut_kernel[num_rows, 1](logits, maxima, parameters, cuts, vocab_size, TILE=_CUT_TILE, num_warps=_CUT_WARPS)
    if is_drawn.any():
        mass_kernel[num_rows, -(-num_runs // _RUNS)](
            logits,
            maxima,
            parameters,
            cuts,
            masses,
            vocab_size,
            num_runs,
            RUN=_RUN_TOKENS,
            RUNS=_RUNS,
            HAS_CUTS=has_cuts,
        )
    pick_kernel[num_rows, 1](
        logits,
        raw_maxima,
        maxima,
        best,
        parameters,
        cuts,
        masses,
        tokens,
        vocab_size,
        num_runs,
        RUN=_RUN_TOKENS,
        RUNS_PAD=triton.next_power_of_2(num_runs),
        HAS_CUTS=has_cuts,
    )
    return tokens
