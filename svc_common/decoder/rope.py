"""Rotary embedding: frequencies from a RopeSpec once, cosines and sines once per sub-batch, rotation per layer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from svc_common.model.rope_scaling import llama3_divisors
from svc_common.model.spec import ModelSpec, RopeSpec


class Rotary:
    """Angles of positions. Kept in fp32 whatever the compute type: at position 100,000 bf16 has no fraction left."""

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self._rope = rope
        self._inverse_wavelengths = _inverse_wavelengths(rope).to(device)  # [rotary_dim / 2], fp32
        self._exponents = _exponents(rope.rotary_dim).to(device)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For positions [n], int64: cosines and sines [n, 1, rotary_dim / 2] in `dtype`."""
        points = positions.to(torch.float32)[:, None]
        frequencies = self._inverse_wavelengths
        if self._rope.scaling == "dynamic":
            frequencies = self._dynamic_frequencies(points)
        angles = points * frequencies
        scale = self._rope.attention_factor
        return (angles.cos() * scale).to(dtype).unsqueeze(1), (angles.sin() * scale).to(dtype).unsqueeze(1)

    def _dynamic_frequencies(self, points: Tensor) -> Tensor:
        """[n, rotary_dim / 2]: beyond the original context the base grows with the position itself.

        By position, not by the batch's longest sequence: a key's rotation must not depend on how a prompt was cut
        into chunks or on its neighbours.
        """
        rope = self._rope
        lengths = (points + 1).clamp(min=rope.original_context_tokens)
        growth = rope.factor * lengths / rope.original_context_tokens - (rope.factor - 1)
        theta = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
        return 1.0 / theta**self._exponents


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a sub-batch's positions, and where they lie: asking torch costs time in every layer."""

    cos: Tensor  # [n, 1, rotary_dim / 2], contiguous
    sin: Tensor  # like cos
    cos_address: int
    sin_address: int


class Rotaries:
    """All rotary embeddings of a model: one, or another for layers with a sliding window."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        kinds = list(dict.fromkeys(layer.rope for layer in spec.layers))
        self._rotaries = [None if rope is None else Rotary(rope, device) for rope in kinds]
        self._none = torch.empty((0, 1, 0), device=device)
        self.of_layer = [kinds.index(layer.rope) for layer in spec.layers]
        """By layer: which of the `rotations` is its."""

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Rotation, ...]:
        """Of positions [n], int64, by kind of layer; empty tensors where there is no rotary embedding."""
        rotations = []
        for rotary in self._rotaries:
            cos, sin = (self._none, self._none) if rotary is None else rotary.cos_sin(positions, dtype)
            cos, sin = cos.contiguous(), sin.contiguous()
            rotations.append(Rotation(cos, sin, cos.data_ptr(), sin.data_ptr()))
        return tuple(rotations)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates heads [n, num_heads, head_dim] in place; pairs are (i, i + rotary_dim / 2)."""
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated_first = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated_first)


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim


def _inverse_wavelengths(rope: RopeSpec) -> Tensor:
    """[rotary_dim / 2], fp32: radians per position."""
    base = 1.0 / rope.theta ** _exponents(rope.rotary_dim)
    match rope.scaling:
        case "none" | "dynamic":
            return base
        case "linear":
            return base / rope.factor
        case "llama3":
            return base / torch.from_numpy(llama3_divisors(rope)).to(torch.float32)
        case "yarn":
            return _yarn(rope, base)
        case "longrope":
            return base / torch.tensor(rope.divisors)


def _yarn(rope: RopeSpec, base: Tensor) -> Tensor:
    """Blends interpolated and original frequencies over the dimensions between two rotation counts (YaRN, 3.2)."""

    def dimension_at(rotations: float) -> float:
        ratio = rope.original_context_tokens / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_at(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_at(rope.beta_slow)), rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    interpolated_share = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base / rope.factor * interpolated_share + base * (1 - interpolated_share)
