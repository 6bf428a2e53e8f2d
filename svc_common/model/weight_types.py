"""Types of weights by name, and the bytes that a model's weights take in each; no torch, for whoever only counts."""

from typing import Literal

from svc_common.model.spec import ModelSpec

FloatTypeName = Literal["fp32", "bf16", "fp16"]
WeightTypeName = FloatTypeName | Literal["int8", "int4"]

# int8: a bf16 scale for each 64. int4: a scale and a minimum in fp16 for each 32; embedding and head are int8.
_LAYER_BYTES: dict[WeightTypeName, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1 + 2 / 64, "int4": 0.5 + 4 / 32}
_VOCABULARY_BYTES: dict[WeightTypeName, float] = {**_LAYER_BYTES, "int4": 1 + 2 / 64}


def is_quantised(name: WeightTypeName) -> bool:
    return name in ("int8", "int4")


def weight_bytes(spec: ModelSpec, name: WeightTypeName) -> int:
    """Of all matrices, positions included, without what padding adds."""
    total = 0.0
    for layer in range(spec.num_layers):
        for matrix in spec.layer_matrices(layer):
            total += matrix.num_parameters * (4 if matrix.always_fp32 else _LAYER_BYTES[name])
    vocabulary = spec.embedding_parameters * (1 if spec.tie_embeddings else 2)
    positions = spec.position_parameters * (4 if is_quantised(name) else _LAYER_BYTES[name])
    return round(total + vocabulary * _VOCABULARY_BYTES[name] + positions)
