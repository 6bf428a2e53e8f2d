"""Names of number types, and the choice of the one to compute in, made once at start-up."""

import logging
import time
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from svc_common.config import ConfigError
from svc_common.cpu_kernels import PackedLinear
from svc_common.decoder.threads import cpu_threads
from svc_common.model.spec import ModelSpec
from svc_common.model.weight_types import FloatTypeName, WeightTypeName, is_quantised

KvDTypeName = FloatTypeName | Literal["int8"]
DTYPES: dict[WeightTypeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "int4": torch.int4,  # type: ignore[attr-defined]  # missing from the stubs only
}
KV_DTYPES: dict[KvDTypeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
}

_DECODE_TOKENS = 16
_PREFILL_TOKENS = 256
_CLEARLY_FASTER = 1.3
_FIRST_WITH_BF16 = (8, 0)
"""Compute capability: Ampere's."""
# Matrices that together exceed most caches, so that decodes read weights from memory as they do in an iteration, and
# of at most so many weights, so that start-up takes a fraction of a second whatever the model's size.
_NUM_MATRICES = 4
_MAX_WEIGHTS = 2**21

logger = logging.getLogger(__name__)


def dtype_name(dtype: torch.dtype) -> WeightTypeName:
    return next(name for name, known in DTYPES.items() if known == dtype)


def choose_compute_dtype(
    configured: Literal["auto"] | WeightTypeName, spec: ModelSpec, device: torch.device
) -> WeightTypeName:
    """As configured; "auto" is the checkpoint's type on a GPU, and on a CPU what a measurement shows.

    16-bit weights are half as much to read, which decides small batches; large ones gain only where the CPU multiplies
    16-bit numbers faster. fp16 is a candidate only for checkpoints that were made in it: others may exceed its range.
    int8 and int4 change tokens and are never chosen by themselves. Raises ConfigError for them on a GPU, and for bf16
    on one that computes none.
    """
    lacks_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_WITH_BF16
    if configured != "auto":
        if is_quantised(configured) and device.type != "cpu":
            raise ConfigError(f'gpu.dtype "{configured}" is for device "cpu"; on {device.type} it is not built')
        if configured == "bf16" and lacks_bf16:
            raise ConfigError('gpu.dtype "bf16": this GPU computes none; "fp16", "fp32" and "auto" are possible')
        return configured
    if device.type != "cpu":
        return _without_bf16(spec) if lacks_bf16 and spec.checkpoint_dtype == "bf16" else spec.checkpoint_dtype
    candidates: tuple[FloatTypeName, ...] = ("fp32", "fp16") if spec.checkpoint_dtype == "fp16" else ("fp32", "bf16")
    measured = {name: _measure(spec, name) for name in candidates}
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


def _without_bf16(spec: ModelSpec) -> FloatTypeName:
    """Gemma's hidden states are known to exceed fp16; of others one that does ends with an error, never unnoticed."""
    chosen: FloatTypeName = "fp32" if "gemma" in spec.architecture.lower() else "fp16"
    logger.warning("this GPU computes no bf16, the checkpoint's type: computing in %s", chosen)
    return chosen


def default_kv_dtype(weights: WeightTypeName) -> FloatTypeName:
    """Type of keys and values beside such weights, where none is configured."""
    if weights == "int8" or weights == "int4":
        return "bf16"
    return weights


def pick_fastest(measured: dict[FloatTypeName, tuple[float, float]]) -> FloatTypeName:
    """fp32, unless another is clearly faster both for decodes and for prompts: (decode_s, prefill_s) by name."""

    def gain(name: FloatTypeName) -> float:
        return min(fp32_s / s for fp32_s, s in zip(measured["fp32"], measured[name], strict=True))

    best = max(measured, key=gain)
    return best if gain(best) >= _CLEARLY_FASTER else "fp32"


def _measure(spec: ModelSpec, name: FloatTypeName) -> tuple[float, float]:
    """Seconds of the MLP's first product, or of a part of it, for a decode-sized and a prefill-sized batch."""
    depth = min(spec.hidden_size, _MAX_WEIGHTS // 2)
    columns_per_output = 2 if spec.gated else 1
    rows = min(columns_per_output * spec.intermediate_size, _MAX_WEIGHTS // depth // 2 * 2)
    weights = np.full((rows, depth), 0.01, np.float32)
    matrices = [PackedLinear(weights, None, name, spec.activation, "auto") for _ in range(_NUM_MATRICES)]

    def product_s(num_tokens: int) -> float:
        hidden = np.full((num_tokens, depth), 0.01, np.float32)
        out = np.empty((num_tokens, rows // columns_per_output), np.float32)
        # The least: a busy neighbour only ever adds.
        return min(_seconds(matrix, hidden, out) for matrix in matrices * 2)

    return product_s(_DECODE_TOKENS), product_s(_PREFILL_TOKENS)


def _seconds(matrix: PackedLinear, hidden: NDArray[np.float32], out: NDArray[np.float32]) -> float:
    start = time.perf_counter()
    matrix.multiply(hidden, None, out, cpu_threads())
    return time.perf_counter() - start
