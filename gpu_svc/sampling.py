"""Turns logits into tokens for a whole batch at once: temperature, top-k, top-p, min-p, then one draw each.

Each filter becomes a threshold on the scaled logit, and the draw walks the surviving tokens in vocabulary order.
So a row's token depends on its own logits, parameters, seed and draw number only: not on its neighbours, and not on
how a sort orders equal logits.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.philox import uniforms

_NUCLEUS_WIDTH = 1024  # Most nuclei are far smaller; a full sort of the vocabulary costs more than a layer.


class NonFiniteLogitsError(Exception):
    """The model computed NaN or infinity."""


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


def sample(logits: Tensor, rows: SamplingRows) -> tuple[NDArray[np.int64], tuple[RowLogprobs, ...]]:
    """logits [n, vocab_size], fp32 -> token ids [n], and log-probabilities of the rows that want them."""
    maxima, greedy = logits.max(dim=-1)
    if not bool(torch.isfinite(maxima).all()):
        bad = torch.nonzero(~torch.isfinite(maxima)).flatten().tolist()
        raise NonFiniteLogitsError(f"logits of rows {bad} are not finite")
    tokens: NDArray[np.int64] = greedy.cpu().numpy()
    drawn = np.flatnonzero(rows.temperature > 0)
    if len(drawn):
        tokens[drawn] = _draw(logits, maxima, rows, drawn)
    wanting = np.flatnonzero(rows.num_logprobs >= 0)
    return tokens, _logprobs(logits, tokens, rows, wanting) if len(wanting) else ()


def _draw(logits: Tensor, maxima: Tensor, rows: SamplingRows, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    device = logits.device
    index = torch.from_numpy(drawn).to(device)
    temperature = torch.from_numpy(rows.temperature[drawn]).to(device)
    scaled = (logits[index] - maxima[index, None]) / temperature[:, None]  # At most 0.
    weights = torch.exp(scaled, out=torch.empty_like(scaled)).masked_fill_(
        scaled < _thresholds(scaled, rows, drawn)[:, None], 0.0
    )
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    points = torch.from_numpy(uniforms(rows.seed[drawn], rows.draw[drawn])).to(device) * total
    # Rounding may lift a point to the total itself, beyond the last token.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    found: NDArray[np.int64] = torch.searchsorted(cumulative, points[:, None], right=True)[:, 0].cpu().numpy()
    return found


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
    width = min(vocab_size, max(_NUCLEUS_WIDTH, int(top_k.max())))
    found, complete = _search(scaled, top_k, top_p, width)
    short = torch.nonzero(~complete).flatten()
    if len(short):
        picked = short.cpu().numpy()
        found[short] = _search(scaled[short], top_k[picked], top_p[picked], vocab_size)[0]
    return found


def _search(scaled: Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float64], width: int) -> tuple[Tensor, Tensor]:
    """Thresholds [n] from each row's `width` likeliest tokens, and whether those sufficed to tell."""
    device, vocab_size = scaled.device, scaled.shape[1]
    kept = torch.from_numpy(np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size).astype(np.int64)).to(device)
    share = torch.from_numpy(top_p).to(device)
    ordered = torch.topk(scaled, width, dim=-1).values
    ranks = torch.arange(width, device=device)
    weights = ordered.to(torch.float64).exp_().masked_fill_(ranks >= kept[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = torch.where(kept <= width, cumulative[:, -1], scaled.to(torch.float64).exp_().sum(dim=-1))
    nucleus = share * total
    # A token belongs to the nucleus while the mass before it falls short.
    num_kept = torch.minimum(((cumulative - weights) < nucleus[:, None]).sum(dim=-1), kept).clamp_(min=1)
    complete = (kept <= width) | ((share < 1) & (cumulative[:, -1] >= nucleus))
    return ordered.gather(1, num_kept.clamp(max=width)[:, None] - 1)[:, 0], complete


def _logprobs(
    logits: Tensor, tokens: NDArray[np.int64], rows: SamplingRows, wanting: NDArray[np.int64]
) -> tuple[RowLogprobs, ...]:
    """Of the model's own distribution, before temperature and filters."""
    index = torch.from_numpy(wanting).to(logits.device)
    logprobs = torch.log_softmax(logits[index], dim=-1)
    chosen = logprobs.gather(1, torch.from_numpy(tokens[wanting]).to(logits.device)[:, None])[:, 0].tolist()
    counts = np.minimum(rows.num_logprobs[wanting], logits.shape[1])
    values, ids = (part.tolist() for part in torch.topk(logprobs, int(counts.max()), dim=-1))
    return tuple(
        RowLogprobs(int(row), chosen[i], tuple(zip(ids[i][: counts[i]], values[i][: counts[i]], strict=True)))
        for i, row in enumerate(wanting)
    )
