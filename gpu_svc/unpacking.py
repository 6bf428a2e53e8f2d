"""Makes of a layer's panels, on any device, the matrices that torch computes with.

Panels are [num_panels, depth, columns], in bf16 [num_panels, ceil(depth / 2), columns, 2]; see linear_kernel.h. In a
gated matrix half of a panel's columns are rows of the gates, the other half of what they gate.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from svc_common.cpu_kernels import WeightPart
from svc_common.decoder.dtypes import DTYPES
from svc_common.decoder.weights import ExpertsWeights, LayerWeights, MlpWeights, NormWeights
from svc_common.model.spec import LayerSpec


class LayerViews:
    """A layer in memory of its own, part by part at the offsets that it has packed."""

    def __init__(
        self, parts: Sequence[WeightPart], layer: LayerSpec, memory: Tensor, dtype: torch.dtype, panel_columns: int
    ) -> None:
        """`memory` [n], uint8, as large as the packed layer."""
        self._parts = parts
        self._panel_columns = panel_columns
        self._targets = {part.name: _target(part, memory, dtype) for part in parts}
        self.weights = _as_weights(self._targets, layer)

    def unpack(self, packed: Tensor) -> None:
        """Fills them from a packed layer [n], uint8, on the same device."""
        for part in self._parts:
            self._targets[part.name].copy_(
                _rows(part, packed, self._panel_columns).view(self._targets[part.name].shape)
            )


def _target(part: WeightPart, memory: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, depth], or of a vector one dimension. Routers and their like stay fp32, vectors take the weights' type."""
    fp32 = part.name in ("router", "shared.gate")
    dtype = torch.float32 if fp32 else dtype
    shape = (
        (part.rows, part.depth) if part.panel_bytes and not part.name.endswith("_bias") else (part.rows * part.depth,)
    )
    if part.name == "shared.gate":
        shape = (part.depth,)
    num_bytes = part.rows * part.depth * dtype.itemsize
    return memory[part.offset : part.offset + num_bytes].view(dtype).view(shape)


def _rows(part: WeightPart, packed: Tensor, panel_columns: int) -> Tensor:
    """[rows, depth]"""
    dtype = DTYPES[part.dtype]  # type: ignore[index]
    if not part.panel_bytes:
        return packed[part.offset : part.offset + 4 * part.depth].view(torch.float32)
    halves = 2 if part.gated else 1
    outputs, columns = part.rows // halves, panel_columns // halves
    num_panels = -(-outputs // columns)
    panels = packed[part.offset : part.offset + num_panels * part.panel_bytes].view(num_panels, part.panel_bytes)
    pair = 2 if dtype == torch.bfloat16 else 1
    num_pairs = -(-part.depth // pair)
    numbers = panels.view(dtype)[:, : num_pairs * panel_columns * pair]
    # [half, panel, column, pair, number in it]
    ordered = numbers.view(num_panels, num_pairs, halves, columns, pair).permute(2, 0, 3, 1, 4)
    rows = ordered.reshape(halves, num_panels * columns, num_pairs * pair)
    return rows[:, :outputs, : part.depth].reshape(part.rows, part.depth)


def _as_weights(tensors: Mapping[str, Tensor], layer: LayerSpec) -> LayerWeights:
    def mlp(prefix: str) -> MlpWeights:
        up, down = (f"{prefix}{name}" for name in ("up", "down"))
        return MlpWeights(tensors[up], tensors[down], tensors.get(f"{up}_bias"), tensors.get(f"{down}_bias"))

    def norm(name: str) -> NormWeights:
        return NormWeights(tensors[name], tensors.get(f"{name}_bias"))

    experts = layer.experts and ExpertsWeights(
        router=tensors["router"],
        mlps=tuple(mlp(f"experts.{expert}.") for expert in range(layer.experts.num_experts)),
        shared=mlp("shared.") if layer.experts.shared_intermediate_size else None,
        shared_gate=tensors.get("shared.gate"),
    )
    return LayerWeights(
        attention_norm=norm("attention_norm"),
        qkv=tensors["qkv"],
        qkv_bias=tensors.get("qkv_bias"),
        q_norm=tensors.get("q_norm"),
        k_norm=tensors.get("k_norm"),
        output=tensors["output"],
        output_bias=tensors.get("output_bias"),
        post_attention_norm=tensors.get("post_attention_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=experts or mlp(""),
        post_mlp_norm=tensors.get("post_mlp_norm"),
    )
