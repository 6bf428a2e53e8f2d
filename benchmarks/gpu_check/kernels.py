"""Whether Triton's kernels compute what torch does in float64: attention by its formula, small operations by torch's.

On a CPU they run in Triton's interpreter, which takes seconds for what a GPU does in microseconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gpu_check import absent
from gpu_check.model import llama, sixteen_bits
from gpu_check.rows import Report
from gpu_check.setting import Setting
from svc_common.decoder.ops import DecoderOps, TorchOps
from svc_common.model.spec import ModelSpec

_BLOCK_TOKENS = 16
_ULPS = 6
"""Of the type, that a result may be off by: some round in between."""
_FP32_ERROR = 1e-4


@dataclass(frozen=True)
class _Shape:
    """Of attention: heads as models have them."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    contexts: tuple[int, ...]
    window: int | None = None
    softcap: float = 0.0

    @property
    def name(self) -> str:
        more = f", window {self.window}" if self.window else ""
        more += f", cap {self.softcap:g}" if self.softcap else ""
        return f"{self.num_q_heads}/{self.num_kv_heads} heads of {self.head_dim}{more}"

    @property
    def spec(self) -> ModelSpec:
        hidden = self.num_q_heads * self.head_dim
        spec = llama(1, hidden, hidden, self.num_q_heads, self.num_kv_heads, 64)
        return replace(spec, sliding_window=self.window, attention_softcap=self.softcap)


_SHAPES = (
    _Shape(32, 8, 128, (1, 17, 600, 4000)),
    _Shape(32, 32, 128, (1, 100, 1500)),
    _Shape(8, 4, 256, (5, 700), window=128, softcap=50.0),
    _Shape(9, 3, 64, (33, 1000)),
)
_TINY_SHAPES = (_Shape(4, 2, 16, (1, 40)), _Shape(6, 2, 16, (30,), window=7, softcap=3.0))


def run(setting: Setting, report: Report) -> None:
    if reason := absent.lacking("triton"):
        report.not_run("Triton's kernels", f"{reason}: the executor uses torch's own operations")
        return
    torch.manual_seed(0)
    sixteen = sixteen_bits(setting.device)
    # Each shape and type is compiled by itself, which takes seconds: all shapes in the type that models have.
    shapes: dict[torch.dtype, tuple[_Shape, ...]] = {torch.float16: _SHAPES[:1], torch.float32: _SHAPES[:1]}
    for dtype, of_type in ({torch.float32: _TINY_SHAPES} if setting.tiny else shapes | {sixteen: _SHAPES}).items():
        for what, ours, right in _cases(of_type, 96 if setting.tiny else 4096, dtype, setting.device):
            _compare(report, f"{what}, {str(dtype).removeprefix('torch.')}", ours, right, dtype)


def _cases(
    shapes: tuple[_Shape, ...], size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What is computed, by the kernel, and as it should be."""
    for shape in shapes:
        yield f"decode attention, {shape.name}", *_decode(shape, dtype, device)
        yield f"prefill attention, {shape.name}", *_prefill(shape, dtype, device)
    yield from _small_operations(size, dtype, device)


def _compare(report: Report, what: str, ours: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    allowed = _FP32_ERROR if dtype == torch.float32 else _ULPS * torch.finfo(dtype).eps
    error = (ours.double() - right.double()).abs() / right.double().abs().clamp(min=1.0)
    largest = float(error.max())  # NaN where there is one.
    report.check(what, largest <= allowed, f"largest error {largest:.2g}, at most {allowed:.2g}", error=largest)


def _decode(shape: _Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    from gpu_svc.attention.triton_backend import TritonAttention

    blocks, tables, sequences = _cache(shape, dtype, device)
    q = torch.randn(len(shape.contexts), shape.num_q_heads, shape.head_dim, device=device).to(dtype)
    out = torch.full_like(q, float("nan"))
    backend = TritonAttention(shape.spec, _BLOCK_TOKENS, dtype, device)
    backend.decode(np.array(shape.contexts), tables).run(0, q, blocks, out)
    rows = [
        _attention(q[i : i + 1], kv, torch.tensor([len(kv) - 1], device=device), shape)
        for i, kv in enumerate(sequences)
    ]
    return out, torch.cat(rows)


def _prefill(shape: _Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The last third of the longest context as a chunk."""
    from gpu_svc.attention.triton_backend import TritonAttention

    blocks, tables, sequences = _cache(shape, dtype, device)
    kv, table = sequences[-1], tables[-1]
    start = len(kv) * 2 // 3
    q = torch.randn(len(kv) - start, shape.num_q_heads, shape.head_dim, device=device).to(dtype)
    out = torch.full_like(q, float("nan"))
    TritonAttention(shape.spec, _BLOCK_TOKENS, dtype, device).prefill(start, len(q), table).run(0, q, blocks, out)
    return out, _attention(q, kv, torch.arange(start, len(kv), device=device), shape)


def _cache(shape: _Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, np.ndarray, list[Tensor]]:
    """A layer of a cache, block tables, and each sequence's K and V [tokens, 2, num_kv_heads, head_dim].

    Blocks lie in any order; what is behind a sequence's end is nonsense.
    """
    from gpu_svc.kv_cache import write_kv_by_index

    widths = [-(-num // _BLOCK_TOKENS) for num in shape.contexts]
    order = iter(np.random.default_rng(0).permutation(sum(widths)).tolist())
    tables = np.zeros((len(widths), max(widths)), np.int32)
    row_elements = _BLOCK_TOKENS * shape.head_dim
    blocks = torch.full((sum(widths), 2, shape.num_kv_heads, row_elements), 1e4, dtype=dtype, device=device)
    sequences = []
    for row, (num, width) in enumerate(zip(shape.contexts, widths, strict=True)):
        tables[row, :width] = [next(order) for _ in range(width)]
        kv = torch.randn(num, 2, shape.num_kv_heads, shape.head_dim, device=device).to(dtype)
        places = torch.arange(num)
        of_token = torch.from_numpy(tables[row].astype(np.int64))[places // _BLOCK_TOKENS]
        write_kv_by_index(blocks, of_token.to(device), (places % _BLOCK_TOKENS).to(device), kv)
        sequences.append(kv)
    return blocks, tables, sequences


def _attention(q: Tensor, kv: Tensor, positions: Tensor, shape: _Shape) -> Tensor:
    """By the formula, in float64; q [n, num_q_heads, head_dim] at `positions`."""
    group = shape.num_q_heads // shape.num_kv_heads
    k, v = (part.double().repeat_interleave(group, 1) for part in kv.unbind(1))
    distance = positions[:, None] - torch.arange(len(kv), device=q.device)
    unseen = (distance < 0) | (distance >= (shape.window or len(kv) + 1))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / shape.head_dim**0.5
    if shape.softcap:
        scores = shape.softcap * (scores / shape.softcap).tanh()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v)


def _small_operations(size: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    from gpu_svc.kv_cache import write_kv_by_index
    from gpu_svc.triton_ops import TritonOps, append_kv

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    rows, added, weight, heads = numbers(5, size), numbers(5, size), numbers(size), numbers(5, 8, 32)
    angles = torch.randn(5, 1, 16, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def all_of(ops: DecoderOps, to: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        yield "RMSNorm", ops.rms_norm(rows.to(to), weight.to(to), 1e-5)
        sum_of, turned = rows.to(to, copy=True), heads.to(to, copy=True)
        yield "RMSNorm of a sum", ops.add_rms_norm_(sum_of, added.to(to), weight.to(to), 1e-5)
        yield "its sum", sum_of
        ops.rotate_(turned, cos.to(to), sin.to(to))
        yield "rotary embedding", turned
        yield "SiLU and multiply", ops.silu_gate(rows.to(to))

    for (what, ours), (_, right) in zip(all_of(TritonOps(), dtype), all_of(TorchOps(), torch.float64), strict=True):
        yield what, ours, right
    kv = numbers(5, 2, 2, 32)
    blocks, offsets = torch.tensor([0, 3, 3, 2, 0], device=device), torch.tensor([5, 0, 1, 3, 4], device=device)
    ours, right = (torch.zeros(4, 2, 2, 6 * 32, dtype=dtype, device=device) for _ in range(2))
    append_kv(ours, blocks, offsets, kv)
    write_kv_by_index(right, blocks, offsets, kv)
    yield "keys and values stored", ours, right
