"""Runs Triton's kernels once at start, beside torch's operations: whether a device can be trusted with them.

Each function returns why not, or None. What raises counts as well: Triton compiles when it first launches.
"""

from collections.abc import Callable, Iterator
from functools import wraps

import numpy as np
import torch
from torch import Tensor

from gpu_svc.attention.backend import AttentionBackend
from gpu_svc.kv_cache import write_kv_by_index
from gpu_svc.sampling import SamplingRows, sample_by_torch
from gpu_svc.triton_ops import TritonOps, append_kv
from gpu_svc.triton_sampling import sample_on_device
from svc_common.decoder.ops import TorchOps
from svc_common.model.spec import ModelSpec

_TOLERANCE = 8
"""In units of the type's last place at 1; numbers are about as large."""
_LEAST_LIMIT = 1e-3
"""Kernels that are wrong are so by far more. On a GPU torch may multiply fp32 in pieces of fewer bits."""
_BLOCK_TOKENS = 16
_CONTEXTS = np.array([1, 3 * _BLOCK_TOKENS + 5])

Pairs = Iterator[tuple[str, Tensor, Tensor]]
"""What, by Triton, by torch."""


def _compared(trial: Callable[..., Pairs]) -> Callable[..., str | None]:
    @wraps(trial)
    def failure(*args: object) -> str | None:
        try:
            for name, ours, torchs in trial(*args):
                limit = max(_TOLERANCE * torch.finfo(torchs.dtype).eps, _LEAST_LIMIT)
                if not torch.allclose(ours, torchs, rtol=limit, atol=limit):
                    off = float((ours.double() - torchs.double()).abs().max())
                    return f"{name} differs from torch's by up to {off:.2g}, more than {limit:.2g}"
        # Whatever keeps it from compiling or running: there are other kernels.
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    return failure


@_compared
def layers_failure(device: torch.device) -> Pairs:
    """Of the operations between a layer's products, and of storing keys and values."""
    rows, weight = _noise(5, 96, device=device), _noise(96, device=device)
    ours, torchs = TritonOps(), TorchOps()
    yield "RMSNorm", ours.rms_norm(rows, weight, 1e-5), torchs.rms_norm(rows, weight, 1e-5)
    added = _noise(5, 96, device=device, seed=1)
    kept, others = rows.clone(), rows.clone()
    yield (
        "RMSNorm of a sum",
        ours.add_rms_norm_(kept, added, weight, 1e-5),
        torchs.add_rms_norm_(others, added, weight, 1e-5),
    )
    yield "a residual", kept, others
    heads, angles = _noise(5, 3, 32, device=device), _noise(5, 1, 16, device=device).float()
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    turned, others = heads.clone(), heads.clone()
    ours.rotate_(turned, cos, sin)
    torchs.rotate_(others, cos, sin)
    yield "a rotation", turned, others
    yield "SiLU and multiply", ours.silu_gate(rows), torchs.silu_gate(rows)
    kv = _noise(5, 2, 3, 32, device=device)
    blocks, offsets = (torch.tensor(places, device=device) for places in ([0, 3, 3, 2, 0], [5, 0, 1, 3, 4]))
    stored, others = (torch.zeros(4, 2, 3, 6 * 32, dtype=kv.dtype, device=device) for _ in range(2))
    append_kv(stored, blocks, offsets, kv)
    write_kv_by_index(others, blocks, offsets, kv)
    yield "storing keys and values", stored, others


@_compared
def sampling_failure(device: torch.device) -> Pairs:
    """Of drawing tokens, greedily, freely and with filters."""
    logits = _noise(4, 700, device=device, dtype=torch.float32)
    rows = SamplingRows(
        temperature=np.array([0, 1, 1, 1], np.float32),
        top_k=np.array([0, 0, 20, 0], np.int32),
        top_p=np.array([1, 1, 1, 0.9], np.float32),
        min_p=np.zeros(4, np.float32),
        seed=np.arange(4, dtype=np.uint64),
        draw=np.zeros(4, np.int64),
        num_logprobs=np.full(4, -1, np.int32),
    )
    ours, torchs = sample_on_device(logits, rows), sample_by_torch(logits, rows)
    yield "sampling", torch.from_numpy(ours.tokens).double(), torch.from_numpy(torchs.tokens).double()


@_compared
def attention_failure(
    ours: AttentionBackend,
    torchs: AttentionBackend,
    spec: ModelSpec,
    block_tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> Pairs:
    """Of two backends of the same model, on its first layer and its last: windows may differ."""
    table_width = -(-int(_CONTEXTS.max()) // block_tokens)
    tables = np.arange(2 * table_width, dtype=np.int32)[::-1].reshape(2, -1).copy()
    kv_numbers = block_tokens * spec.head_dim
    blocks = _noise(2 * table_width, 2, spec.num_kv_heads, kv_numbers, device=device, dtype=kv_dtype)
    longest = int(_CONTEXTS.max())
    for layer in dict.fromkeys((0, spec.num_layers - 1)):
        q = _noise(2, spec.num_q_heads, spec.head_dim, device=device, dtype=dtype)
        out, others = torch.empty_like(q), torch.empty_like(q)
        ours.decode(_CONTEXTS, tables).run(layer, q, blocks, out)
        torchs.decode(_CONTEXTS, tables).run(layer, q, blocks, others)
        yield "attention of decodes", out, others
        q = _noise(7, spec.num_q_heads, spec.head_dim, device=device, dtype=dtype)
        out, others = torch.empty_like(q), torch.empty_like(q)
        ours.prefill(longest - 7, 7, tables[1]).run(layer, q, blocks, out)
        torchs.prefill(longest - 7, 7, tables[1]).run(layer, q, blocks, others)
        yield "attention of prompts", out, others


def _noise(*shape: int, device: torch.device, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
