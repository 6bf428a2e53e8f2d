"""Attention written out in float64, and a layer of a cache whose blocks lie in any order."""

import numpy as np
import torch
from torch import Tensor

from support.cpu_attention import to_blocks
from svc_common.decoder.dtypes import DTYPES
from svc_common.model.spec import ModelSpec, RopeSpec

HEAD_DIM = 16


def spec(num_q_heads: int, num_kv_heads: int, window: int | None = None, softcap: float = 0.0) -> ModelSpec:
    """Two layers, the second without the window."""
    return ModelSpec(
        "llama",
        2,
        64,
        96,
        num_q_heads,
        num_kv_heads,
        HEAD_DIM,
        100,
        4096,
        1e-5,
        RopeSpec(1e4, HEAD_DIM),
        True,
        (2,),
        "fp32",
        sliding_window=window,
        full_layers=(1,),
        attention_softcap=softcap,
    )


def plain(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None, softcap: float) -> Tensor:
    """q [n, num_q_heads, d] at `positions`; k, v [tokens, num_kv_heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, 1) for part in (k, v))
    distance = positions[:, None] - torch.arange(len(k))
    unseen = (distance < 0) | (distance >= (window or len(k) + 1))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / HEAD_DIM**0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v)


def fill(
    lengths: list[int], num_kv_heads: int, block_tokens: int, dtype: str
) -> tuple[Tensor, np.ndarray, list[Tensor]]:
    """One layer of a cache, block tables, and each sequence's [2, tokens, num_kv_heads, d] as the cache rounds it."""
    widths = [-(-length // block_tokens) for length in lengths]
    order = iter(np.random.default_rng(0).permutation(sum(widths)).tolist())
    values = torch.full((sum(widths), 2, num_kv_heads, block_tokens, HEAD_DIM), 1e4)  # Unused tails hold nonsense.
    tables = np.zeros((len(lengths), max(widths)), np.int32)
    sequences = []
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        kv = torch.randn(2, length, num_kv_heads, HEAD_DIM)
        sequences.append(kv.to(DTYPES[dtype]).float())
        for column in range(width):
            tables[row, column] = block = next(order)
            part = kv[:, column * block_tokens : (column + 1) * block_tokens]
            values[block, :, :, : part.shape[1]] = part.transpose(1, 2)
    blocks = torch.from_numpy(to_blocks(values.numpy(), dtype))
    return blocks.view(DTYPES[dtype]), tables, sequences
