"""Types of weights by name; no torch, for whoever only names them."""

from typing import Literal

FloatTypeName = Literal["fp32", "bf16", "fp16"]
WeightTypeName = FloatTypeName | Literal["int8", "int4"]


def is_quantised(name: WeightTypeName) -> bool:
    return name in ("int8", "int4")
