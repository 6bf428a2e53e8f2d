"""int8 and int4 weights, and the rows they are multiplied with, in numpy: the same rounding, written down once more."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

GROUP = {"int8": 64, "int4": 32}


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
    """What int8 makes of weights [columns, depth], none of them tiny or infinite."""
    groups = grouped(weights, 64)
    scales = int8_scales(groups)
    integers = np.clip(np.rint(groups * (np.float32(1) / scales)), -127, 127)
    return _flat(integers.astype(np.float32) * scales, weights.shape[1])


def rows_as_int16(rows: Array, dtype: str) -> Wide:
    """What a product with weights of that type reads of rows [n, depth]."""
    groups = grouped(rows, GROUP[dtype])
    largest = np.abs(groups).max(-1, keepdims=True)
    integers = np.rint(groups * (np.float32(32767) / largest))
    scales = (largest / np.float32(32767)).astype(np.float64)
    return (integers * scales).reshape(len(rows), -1)[:, : rows.shape[1]]
