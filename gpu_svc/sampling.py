"""Turns logits into tokens for a whole batch at once: changes of single logits, temperature, top-k, top-p, min-p, then
one draw each.

Each filter becomes a threshold on the scaled logit, and the draw walks the surviving tokens in vocabulary order.
So a row's token depends on its own logits, parameters, seed and draw number only: not on its neighbours, and not on
how a sort orders equal logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.device_kernels import has_triton
from gpu_svc.philox import uniforms
from svc_common.cpu_kernels import argmax_rows
from svc_common.decoder.threads import cpu_threads

_RUN_TOKENS = 256
# Most nuclei are small; a sort of the whole vocabulary, tried last, costs as much as many layers.
_SEARCH_WIDTHS = (128, 4096)
MOST_DRAWN = {"cpu": 2**21, "cuda": 2**23}
"""Logits that are drawn from at a time; a piece takes some 45 bytes for each."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is drawn: arrays [n]. Meanings as in SequenceSampling of the proto."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    draw: NDArray[np.int64]
    """Number of the draw in the row's stream."""
    num_logprobs: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    row: int
    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What `sample` makes of logits."""

    tokens: NDArray[np.int64]  # [n]
    logprobs: tuple[RowLogprobs, ...]
    """Of rows that want them."""
    bad_rows: NDArray[np.int64]
    """Whose logits are no numbers: NaN or infinite. They get token 0, and no log-probabilities."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that changes logits before temperature and filters: penalties, say, or a grammar's mask."""

    rows: NDArray[np.int64]
    """[m]: the rows that change."""
    apply_: Callable[[Tensor], None]
    """Takes all logits [n, vocab_size], fp32, dense, and changes these rows in place."""


def sample(logits: Tensor, rows: SamplingRows, changes: Sequence[Change] = ()) -> Drawn:
    """From logits [n, vocab_size], fp32.

    Changes `logits` in place where there are `changes`; log-probabilities are of the logits as they were.
    """
    if has_triton(logits.device):
        from gpu_svc.triton_sampling import sample_on_device  # Torch for CPUs brings no Triton.

        return sample_on_device(logits, rows, changes)
    return sample_by_torch(logits, rows, changes)


def sample_by_torch(logits: Tensor, rows: SamplingRows, changes: Sequence[Change] = ()) -> Drawn:
    """The same by torch's operations, on any device, and on the CPU by kernels of its own."""
    maxima, tokens = _best(logits)
    is_finite = torch.isfinite(maxima).cpu().numpy()
    wanting = np.flatnonzero((rows.num_logprobs >= 0) & is_finite)
    raw = logits[torch.from_numpy(wanting).to(logits.device)] if len(wanting) else None
    if changes:
        changed = np.unique(np.concatenate([change.rows for change in changes]))
        for change in changes:
            change.apply_(logits)
        index = torch.from_numpy(changed).to(logits.device)
        maxima[index], tokens[changed] = _best(logits[index])
    drawn = np.flatnonzero((rows.temperature > 0) & is_finite)
    step = max(1, MOST_DRAWN[logits.device.type] // logits.shape[1])
    for start in range(0, len(drawn), step):
        piece = drawn[start : start + step]
        tokens[piece] = _draw(logits, maxima, rows, piece)
    tokens[~is_finite] = 0
    return Drawn(tokens, () if raw is None else _logprobs(raw, tokens, rows, wanting), np.flatnonzero(~is_finite))


def _best(logits: Tensor) -> tuple[Tensor, NDArray[np.int64]]:
    """The largest logit of each row, NaN where a row has one, and its token."""
    if logits.device.type == "cpu":
        tokens, maxima = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
        argmax_rows(logits.numpy(), tokens, maxima, cpu_threads(), "auto")
        return torch.from_numpy(maxima), tokens
    largest, places = logits.max(dim=-1)
    return largest, places.cpu().numpy()


def _draw(logits: Tensor, maxima: Tensor, rows: SamplingRows, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of the rows `drawn`."""
    device, vocab_size = logits.device, logits.shape[1]
    index = torch.from_numpy(drawn).to(device)
    temperature = torch.from_numpy(rows.temperature[drawn]).to(device)
    scaled = logits[index].sub_(maxima[index, None]).div_(temperature[:, None])  # At most 0.
    weights = torch.zeros((len(drawn), -(-vocab_size // _RUN_TOKENS) * _RUN_TOKENS), device=device)
    torch.exp(scaled, out=weights[:, :vocab_size])
    thresholds = _thresholds(scaled, rows, drawn)
    if bool((thresholds > float("-inf")).any()):
        weights[:, :vocab_size].masked_fill_(scaled < thresholds[:, None], 0.0)
    points = torch.from_numpy(uniforms(rows.seed[drawn], rows.draw[drawn])).to(device)
    found: NDArray[np.int64] = _invert(weights.view(len(drawn), -1, _RUN_TOKENS), points).cpu().numpy()
    return found


def _invert(weights: Tensor, points: Tensor) -> Tensor:
    """weights [n, num_runs, _RUN_TOKENS], points [n] in [0, 1), fp64 -> tokens [n]: the inverse of the distribution.

    First the run of tokens, then the token in it: a running sum over the whole vocabulary costs far more.
    """
    masses = weights.sum(dim=-1).to(torch.float64)
    cumulative = masses.cumsum(dim=-1)
    points = points * cumulative[:, -1]
    run = _first_above(cumulative, points)[:, None]
    before = (cumulative.gather(1, run) - masses.gather(1, run))[:, 0]
    inner = weights.gather(1, run[:, :, None].expand(-1, -1, _RUN_TOKENS))[:, 0].to(torch.float64).cumsum(dim=-1)
    return run[:, 0] * _RUN_TOKENS + _first_above(inner, (points - before).clamp_(min=0.0))


def _first_above(cumulative: Tensor, points: Tensor) -> Tensor:
    """[n]: the first place where cumulative [n, m] exceeds points [n]."""
    total = cumulative[:, -1]
    # Rounding may lift a point to the total itself, which nothing exceeds.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points[:, None], right=True)[:, 0]


def _thresholds(scaled: Tensor, rows: SamplingRows, drawn: NDArray[np.int64]) -> Tensor:
    """[n], fp32: the least scaled logit that all of a row's filters keep."""
    with np.errstate(divide="ignore"):
        thresholds = torch.from_numpy(np.log(rows.min_p[drawn])).to(scaled.device)
    filtered = np.flatnonzero((rows.top_k[drawn] > 0) | (rows.top_p[drawn] < 1))
    if len(filtered):
        top_k, top_p = rows.top_k[drawn][filtered], rows.top_p[drawn][filtered].astype(np.float64)
        index = torch.from_numpy(filtered).to(scaled.device)
        found = _top_thresholds(scaled[index], top_k, top_p)
        thresholds[index] = torch.maximum(thresholds[index], found)
    return thresholds


def _top_thresholds(scaled: Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float64]) -> Tensor:
    """[n], fp32: the scaled logit of the last token that top-k and then top-p keep."""
    vocab_size = scaled.shape[1]
    masses = scaled.exp().sum(dim=-1).to(torch.float64)
    found = torch.empty_like(scaled[:, 0])
    left = np.arange(len(scaled))
    for width in (*_SEARCH_WIDTHS, vocab_size):
        index = torch.from_numpy(left).to(scaled.device)
        width = min(vocab_size, max(width, int(top_k[left].max())))
        found[index], complete = _search(scaled[index], masses[index], top_k[left], top_p[left], width)
        left = left[~complete.cpu().numpy()]
        if not len(left):
            break
    return found


def _search(
    scaled: Tensor, masses: Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float64], width: int
) -> tuple[Tensor, Tensor]:
    """Thresholds [n] from each row's `width` likeliest tokens, and whether those sufficed to tell."""
    device, vocab_size = scaled.device, scaled.shape[1]
    kept = torch.from_numpy(np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size).astype(np.int64)).to(device)
    share = torch.from_numpy(top_p).to(device)
    ordered = torch.topk(scaled, width, dim=-1).values
    weights = ordered.to(torch.float64).exp_()
    weights.masked_fill_(torch.arange(width, device=device) >= kept[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    nucleus = share * torch.where(kept <= width, cumulative[:, -1], masses)
    # A token belongs to the nucleus while the mass before it falls short.
    num_kept = torch.minimum(((cumulative - weights) < nucleus[:, None]).sum(dim=-1), kept).clamp_(min=1)
    complete = (kept <= width) | (cumulative[:, -1] >= nucleus)
    return ordered.gather(1, num_kept[:, None] - 1)[:, 0], complete


def _logprobs(
    raw: Tensor, tokens: NDArray[np.int64], rows: SamplingRows, wanting: NDArray[np.int64]
) -> tuple[RowLogprobs, ...]:
    """Of the model's own distribution, whose logits for the rows `wanting` are raw [len(wanting), vocab_size]."""
    width = min(int(rows.num_logprobs[wanting].max()), raw.shape[1])
    chosen, ids, values = gather_logprobs(raw, torch.from_numpy(tokens[wanting]).to(raw.device), width)
    return row_logprobs(wanting, chosen.cpu().numpy(), ids.cpu().numpy(), values.cpu().numpy(), rows)


def gather_logprobs(raw: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens [m] by logits raw [m, vocab_size]; the likeliest tokens, and theirs [m, width]."""
    logprobs = torch.log_softmax(raw, dim=-1)
    values, ids = torch.topk(logprobs, width, dim=-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], ids, values


def row_logprobs(
    wanting: NDArray[np.int64],
    chosen: NDArray[np.floating[Any]],
    ids: NDArray[np.int64],
    values: NDArray[np.floating[Any]],
    rows: SamplingRows,
) -> tuple[RowLogprobs, ...]:
    """What `gather_logprobs` found for the rows `wanting` [m]; of each as many as it asks for."""
    counts = np.minimum(rows.num_logprobs[wanting], ids.shape[1])
    return tuple(
        RowLogprobs(row, of_token, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for row, of_token, row_ids, row_values, count in zip(
            wanting.tolist(), chosen.tolist(), ids.tolist(), values.tolist(), counts.tolist(), strict=True
        )
    )
