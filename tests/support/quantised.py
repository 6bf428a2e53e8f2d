"""int8 and int4 weights, and the rows they are multiplied with, in numpy: the same rounding, written down once more."""

import copy

import numpy as np
import numpy.typing as npt
import torch

from support.reference import Reference, load_transformers
from svc_common.cpu_kernels import PackedLinear, ThreadPool
from svc_common.model.store import ModelFiles

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

GROUP = {"int8": 64, "int4": 32}
TIE = 1e-2
"""Between two best logits; of the default model they are off by as much where rows are rounded to 16 bits."""


def grouped(matrix: Array, size: int) -> Array:
    """[rows, groups, size], padded with zeros."""
    rows, depth = matrix.shape
    return np.pad(matrix, ((0, 0), (0, -depth % size))).reshape(rows, -1, size)


def _flat(groups: npt.NDArray[np.float32], depth: int) -> Wide:
    return groups.reshape(len(groups), -1)[:, :depth].astype(np.float64)


def int8_scales(groups: Array) -> Array:
    """[rows, groups, 1]: the least bf16 numbers that times 127 reach each group's largest weight."""
    largest = np.abs(groups).max(-1, keepdims=True)
    bits = (largest / np.float32(127)).view(np.uint32)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)
    above = (nearest.view(np.uint32) + 0x10000).view(np.float32)
    return np.where(nearest * np.float32(127) < largest, above, nearest)


def as_int8(weights: Array) -> Wide:
    """What int8 makes of weights [columns, depth], each 0 or neither tiny nor infinite."""
    groups = grouped(weights, 64)
    scales = int8_scales(groups)
    inverse = np.float32(1) / np.where(scales > 0, scales, np.float32(np.inf))
    integers = np.clip(np.rint(groups * inverse), -127, 127)
    return _flat(integers.astype(np.float32) * scales, weights.shape[1])


def rows_as_int16(rows: Array, dtype: str) -> Wide:
    """What a product with weights of that type reads of rows [n, depth]."""
    groups = grouped(rows, GROUP[dtype])
    largest = np.abs(groups).max(-1, keepdims=True)
    integers = np.rint(groups * (np.float32(32767) / largest))
    scales = (largest / np.float32(32767)).astype(np.float64)
    return (integers * scales).reshape(len(rows), -1)[:, : rows.shape[1]]


def held(weights: Array, dtype: str, instruction_set: str = "auto") -> Array:
    """The weights as they are held, [columns, depth], each read by a row that has one number, within 4e-7 of it.

    Of int4 also within 4e-7 of its group's largest: minimum and multiple of the scale come as two.
    """
    columns, depth = weights.shape
    out = np.empty((depth, columns), np.float32)
    linear = PackedLinear(weights, None, dtype, "none", instruction_set)
    linear.multiply(np.eye(depth, dtype=np.float32), None, out, ThreadPool(1))
    return np.ascontiguousarray(out.T)


def rounded_reference(files: ModelFiles, dtype: str) -> Reference:
    """transformers in fp32, with those weights rounded that a decoder of that type rounds."""
    model = copy.deepcopy(load_transformers(files))
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith("gate.weight") or "embed_positions" in name:
            continue
        kept = "int8" if "embed_tokens" in name or "lm_head" in name else dtype
        matrices = parameter.data.view(-1, *parameter.shape[-2:])  # of experts, several
        for matrix in matrices:
            matrix.copy_(torch.from_numpy(as_int8(matrix.numpy()) if kept == "int8" else held(matrix.numpy(), kept)))
    return Reference(files, model, TIE)
