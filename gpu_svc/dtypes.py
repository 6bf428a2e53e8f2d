"""Names of number types, and the choice of the one to compute in, made once at start-up."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from svc_common.model.spec import ModelSpec

DTypeName = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[DTypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_DECODE_TOKENS = 16
_PREFILL_TOKENS = 256
_CLEARLY_FASTER = 1.3

logger = logging.getLogger(__name__)


def dtype_name(dtype: torch.dtype) -> DTypeName:
    return next(name for name, known in DTYPES.items() if known == dtype)


def choose_compute_dtype(
    configured: Literal["auto", "fp32", "bf16", "fp16"], spec: ModelSpec, device: torch.device
) -> DTypeName:
    """As configured; "auto" is the checkpoint's type on a GPU, and on a CPU what a measurement shows.

    A CPU without 16-bit matrix units computes 16-bit products several times slower than fp32 ones. fp16 is a
    candidate only for checkpoints that were made in it: others may exceed its range.
    """
    if configured != "auto":
        return configured
    if device.type != "cpu":
        return spec.checkpoint_dtype
    candidates: tuple[DTypeName, ...] = ("fp32", "fp16") if spec.checkpoint_dtype == "fp16" else ("fp32", "bf16")
    measured = {name: _measure(spec, DTYPES[name]) for name in candidates}
    chosen = pick_fastest(measured)
    logger.info(
        "dtype auto: computing in %s; measured %s",
        chosen,
        ", ".join(
            f"{name} {decode_s * 1e3:.2f} ms for {_DECODE_TOKENS} tokens and {prefill_s * 1e3:.2f} ms for "
            f"{_PREFILL_TOKENS}"
            for name, (decode_s, prefill_s) in measured.items()
        ),
    )
    return chosen


def pick_fastest(measured: dict[DTypeName, tuple[float, float]]) -> DTypeName:
    """fp32, unless another is clearly faster both for decodes and for prompts: (decode_s, prefill_s) by name."""

    def gain(name: DTypeName) -> float:
        return min(fp32_s / s for fp32_s, s in zip(measured["fp32"], measured[name], strict=True))

    best = max(measured, key=gain)
    return best if gain(best) >= _CLEARLY_FASTER else "fp32"


def _measure(spec: ModelSpec, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the MLP's first product of a layer, for a decode-sized and a prefill-sized batch."""
    weights = [torch.full((2 * spec.intermediate_size, spec.hidden_size), 0.01, dtype=dtype) for _ in range(4)]

    def product_s(num_tokens: int) -> float:
        hidden = torch.full((num_tokens, spec.hidden_size), 0.01, dtype=dtype)
        # The least: a busy neighbour only ever adds.
        return min(_seconds(partial(F.linear, hidden, weight)) for weight in weights * 3)

    product_s(_DECODE_TOKENS)  # The first call of a type compiles its kernel.
    return product_s(_DECODE_TOKENS), product_s(_PREFILL_TOKENS)


def _seconds(operation: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start
