"""A plain float64 reference of decode attention, and the real cpu_attn_svc in a process of its own."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from neoflex.v1 import cpu_attention_pb2 as pb
from neoflex.v1 import cpu_attention_pb2_grpc
from svc_common.tensor_plane import RegionShape, TensorPlane

Array = npt.NDArray[Any]

TOLERANCE = {"fp32": 8e-6, "fp16": 2e-3, "bf16": 2e-2}
"""Largest error of an output of about 1, by the type it is rounded to."""


def encode(values: Array, dtype: str) -> Array:
    if dtype == "fp16":
        return values.astype(np.float16)
    if dtype == "fp32":
        return values.astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(array: Array) -> npt.NDArray[np.float64]:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Pool:
    """A layer of KV as a cache holds it."""

    blocks: Array
    """[..., 2, num_kv_heads, block_tokens * head_dim]"""
    scales: Array | None
    """[..., 2, num_kv_heads], for int8."""

    def values(self, head_dim: int) -> npt.NDArray[np.float64]:
        """What they mean, as `from_blocks`."""
        values = from_blocks(self.blocks, head_dim)
        return values if self.scales is None else values * self.scales[..., None, None]


def to_pool(values: Array, dtype: str) -> Pool:
    """Of values as for `to_blocks`. In int8 what is NaN has no say in its block's scale, and becomes any number."""
    if dtype != "int8":
        return Pool(to_blocks(values, dtype), None)
    scales = (np.fmax.reduce(np.abs(values), axis=(-2, -1)) / 127).astype(np.float32)
    with np.errstate(invalid="ignore"):
        numbers = np.round(values / scales[..., None, None].astype(np.float64))
    return Pool(to_blocks(np.where(np.isnan(numbers), -128, numbers).astype(np.int8), "int8"), scales)


def to_blocks(values: Array, dtype: str) -> Array:
    """Values [..., 2, num_kv_heads, block_tokens, head_dim] as a pool holds them, the last two axes as one."""
    encoded = values if dtype == "int8" else encode(values, dtype)
    keys, values = encoded[..., 0, :, :, :], encoded[..., 1, :, :, :]
    block_tokens, head_dim = keys.shape[-2:]
    paired = head_dim // 2 * 2 if dtype in ("bf16", "int8") else 0
    keys = _interleaved(keys, paired)
    values = _interleaved(values.swapaxes(-2, -1), block_tokens // 2 * 2 if dtype == "int8" else 0)
    return np.stack([keys, values], axis=-3)


def _interleaved(rows: Array, paired: int) -> Array:
    """[..., n, m] as [..., paired / 2, n, 2] of the first columns, then [..., m - paired, n]; the last axes as one."""
    *outer, n, _ = rows.shape
    pairs = rows[..., :paired].reshape(*outer, n, paired // 2, 2).swapaxes(-3, -2)
    singles = rows[..., paired:].swapaxes(-2, -1)
    return np.concatenate([pairs.reshape(*outer, -1), singles.reshape(*outer, -1)], axis=-1)


def _uninterleaved(rows: Array, n: int, paired: int) -> Array:
    *outer, size = rows.shape
    pairs = rows[..., : paired * n].reshape(*outer, paired // 2, n, 2).swapaxes(-3, -2).reshape(*outer, n, paired)
    singles = rows[..., paired * n :].reshape(*outer, size // n - paired, n).swapaxes(-2, -1)
    return np.concatenate([pairs, singles], axis=-1)


def from_blocks(pool: Array, head_dim: int) -> npt.NDArray[np.float64]:
    """The values of `to_blocks`."""
    keys, values = decode(pool[..., 0, :, :]), decode(pool[..., 1, :, :])
    block_tokens = keys.shape[-1] // head_dim
    keys = _uninterleaved(keys, block_tokens, head_dim // 2 * 2 if pool.dtype in (np.uint16, np.int8) else 0)
    values = _uninterleaved(values, head_dim, block_tokens // 2 * 2 if pool.dtype == np.int8 else 0)
    return np.stack([keys, values.swapaxes(-2, -1)], axis=-4)


def attention(
    q: Array,
    layer: Array,
    tables: Array,
    context_tokens: Array,
    scale: float,
    window: int,
    softcap: float = 0.0,
) -> npt.NDArray[np.float64]:
    """[n, num_q_heads, head_dim] by the formula; `layer` as `from_blocks` gives it."""
    block_tokens, num_kv_heads = layer.shape[3], layer.shape[2]
    group = q.shape[1] // num_kv_heads
    out = np.empty(q.shape)
    for i, context in enumerate(context_tokens):
        positions = np.arange(max(0, context - window) if window else 0, context)
        rows = layer[tables[i][positions // block_tokens], :, :, positions % block_tokens]
        for head in range(q.shape[1]):
            scores = rows[:, 0, head // group] @ q[i, head] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ rows[:, 1, head // group] / weights.sum()
    return out


class Service:
    """`python -m cpu_attn_svc` on a Unix socket, with a segment directory of its own."""

    def __init__(self, directory: Path, drain_s: int = 0, **cpu_attn: object) -> None:
        self.segment_dir = directory / "segments"
        self.segment_dir.mkdir(exist_ok=True)
        self.kv_bytes = int(str(cpu_attn.get("kv_bytes", 4 * 2**20)))
        self.listen = listen = f"unix:{directory / 'control'}"
        values = {
            "listen": listen,
            "kv_bytes": self.kv_bytes,
            "segment_dir": self.segment_dir,
            "num_threads": 1,
            **cpu_attn,
        }
        config = directory / "config.toml"
        lines = [f"{key} = {value if isinstance(value, int) else repr(str(value))}" for key, value in values.items()]
        config.write_text("\n".join(["[planner]", f"drain_s = {drain_s}", "[cpu_attn]", *lines]))
        self.process = subprocess.Popen([sys.executable, "-m", "cpu_attn_svc", "--config", str(config)])
        self._channel = grpc.insecure_channel(listen)
        self.stub = cpu_attention_pb2_grpc.CpuAttentionServiceStub(self._channel)

    def wait_ready(self) -> "Service":
        grpc.channel_ready_future(self._channel).result(120)
        return self

    def open(self, epoch: int, shape: RegionShape) -> pb.OpenRegionResponse:
        return self.stub.OpenRegion(pb.OpenRegionRequest(epoch=epoch, **dataclasses.asdict(shape)), timeout=20)

    def attach(self, epoch: int, shape: RegionShape) -> TensorPlane:
        opened = self.open(epoch, shape)
        return TensorPlane.attach(opened.path, opened.descriptor_endpoint, epoch, shape)

    def status(self) -> pb.GetCpuAttentionStatusResponse:
        return self.stub.GetCpuAttentionStatus(pb.GetCpuAttentionStatusRequest(), timeout=20)

    def segments(self) -> list[str]:
        # Not by rglob: that fails where a directory goes while it looks.
        return sorted(name for _, *entries in os.walk(self.segment_dir) for names in entries for name in names)

    def until(self, holds: Callable[["Service"], bool]) -> None:
        """Asks again and again; a test's own time limit ends it."""
        while not holds(self):
            time.sleep(0.01)

    def end(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()
