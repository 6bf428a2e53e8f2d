"""The small operations of a layer in Triton: each reads and writes its rows once."""

import torch
import triton
from torch import Tensor

from gpu_svc.kv_layout import pairs_keys
from gpu_svc.triton_kernels.layers import append_kernel, norm_kernel, rotate_kernel, silu_gate_kernel

_GATE_TILE = 1024
_NUMBERS_PER_WARP = 1024
"""Of a row that is normalised: 32 a thread stay in registers."""
_MAX_WARPS = 16


class TritonOps:
    """`DecoderOps` of device cuda; on the CPU's tensors with TRITON_INTERPRET=1."""

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        heads = rows.shape[1] if rows.dim() == 3 else 1
        _norm(rows, None, weight, out, heads, eps)
        return out

    def add_rms_norm_(self, hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        _norm(hidden, added, weight, out, 1, eps)
        return out

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        num_tokens, num_heads, _ = heads.shape
        half = cos.shape[-1]
        rotate_kernel[num_tokens, 1](
            heads,
            cos,
            sin,
            heads.stride(0),
            heads.stride(1),
            NUM_HEADS=num_heads,
            HEADS_PAD=triton.next_power_of_2(num_heads),
            HALF=half,
            HALF_PAD=triton.next_power_of_2(half),
        )

    def silu_gate(self, inner: Tensor) -> Tensor:
        num_rows, size = inner.shape[0], inner.shape[1] // 2
        out = torch.empty((num_rows, size), dtype=inner.dtype, device=inner.device)
        if num_rows:
            silu_gate_kernel[num_rows, triton.cdiv(size, _GATE_TILE)](
                inner, out, inner.stride(0), SIZE=size, TILE=_GATE_TILE
            )
        return out


def append_kv(layer_blocks: Tensor, blocks: Tensor, offsets: Tensor, kv: Tensor) -> None:
    """`write_kv_by_index`: stores kv [n, 2, num_kv_heads, head_dim] in one layer; blocks and offsets [n], int64."""
    num_tokens, _, num_kv_heads, head_dim = kv.shape
    if not num_tokens:
        return
    append_kernel[num_tokens, 2](
        kv,
        layer_blocks,
        blocks,
        offsets,
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        layer_blocks.stride(0),
        layer_blocks.stride(1),
        NUM_HEADS=num_kv_heads,
        HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_TOKENS=layer_blocks.shape[-1] // head_dim,
        PAIRED_KEYS=pairs_keys(layer_blocks.dtype),
    )


def _norm(rows: Tensor, added: Tensor | None, weight: Tensor, out: Tensor, heads: int, eps: float) -> None:
    num_tokens = rows.shape[0]
    if not num_tokens:
        return
    size_pad = triton.next_power_of_2(len(weight))
    norm_kernel[num_tokens * heads, 1](
        rows,
        rows if added is None else added,
        weight,
        out,
        rows.stride(0),
        rows.stride(0) if added is None else added.stride(0),
        rows.stride(1) if heads > 1 else 0,
        eps,
        HEADS=heads,
        SIZE=len(weight),
        SIZE_PAD=size_pad,
        HAS_ADDED=added is not None,
        num_warps=min(max(size_pad // _NUMBERS_PER_WARP, 1), _MAX_WARPS),
    )
