"""Sizes of captured iterations, and which of them may hold a batch."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from gpu_svc.graph_keys import GraphKey, decode_keys, mixed_keys
from gpu_svc.graph_options import graph_bytes, graph_options
from gpu_svc.packed_arrays import PackedArrays, to_device
from svc_common.config import ConfigError, GpuConfig


def test_sizes_of_decodes() -> None:
    assert [key.num_rows for key in decode_keys(20)] == [20, 16, 8, 4, 2, 1]
    assert [key.num_rows for key in decode_keys(1)] == [1]
    sizes = [key.num_rows for key in reversed(decode_keys(1000))]
    assert sizes[:12] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72]
    assert sizes[-1] == 512
    assert all(size - before <= max(8, before // 8) for before, size in pairwise(sizes))


@pytest.mark.parametrize("most", [1, 6, 40, 256])
def test_every_small_mixed_batch_is_held(most: int) -> None:
    keys = mixed_keys(most, with_gpu_rows=True)
    counts = [0, 1, 3, 4, 5, 17, 33]
    for gpu in counts:
        for first in counts:
            for second in counts[1:]:
                if gpu + first + second <= most:
                    one, two = GraphKey(gpu, (second,)), GraphKey(gpu, (first, second))
                    assert any(key.can_hold(one) for key in keys)
                    assert not gpu + first or any(key.can_hold(two) for key in keys)
    assert len(keys) <= 120
    assert [key.num_rows for key in keys] == sorted((key.num_rows for key in keys), reverse=True)
    assert not any(key.gpu_rows for key in mixed_keys(most, with_gpu_rows=False))


def test_what_a_key_can_hold() -> None:
    assert GraphKey(16, (4, 4)).can_hold(GraphKey(9, (1, 4)))
    assert not GraphKey(16, (4, 4)).can_hold(GraphKey(17, (1, 4)))
    assert not GraphKey(16, (4, 4)).can_hold(GraphKey(9, (0, 4)))  # The CPU would be told of a sub-batch that is none.
    assert not GraphKey(16, (0, 4)).can_hold(GraphKey(9, (1, 4)))
    assert not GraphKey(16, (4,)).can_hold(GraphKey(9, (4, 4)))
    assert not GraphKey(16, (4, 4)).can_hold(GraphKey(3, (1, 1)))  # More than four rows for one.


def test_arrays_cross_as_they_are() -> None:
    layout = PackedArrays((np.int64, (3,)), (np.int32, (5,)), (np.int64, (0,)), (np.int32, (2, 3)))
    assert layout.num_bytes == 32 + 32 + 0 + 32
    buffer = torch.zeros(layout.num_bytes + 8, dtype=torch.uint8)
    there, here = layout.on_device(buffer), layout.in_host(buffer.numpy())
    for number, array in enumerate(here):
        array[...] = np.arange(array.size).reshape(array.shape) + 100 * number
    assert [tensor.tolist() for tensor in there] == [array.tolist() for array in here]
    assert there[3].tolist() == [[300, 301, 302], [303, 304, 305]]
    assert [tensor.dtype for tensor in there] == [torch.int64, torch.int32, torch.int64, torch.int32]
    assert all(tensor.data_ptr() % 4 == 0 for tensor in there)
    mixed = [np.array([True, False, True]), np.float32([1.5, 2.5]), np.float64([[0.1], [0.2]])]
    layout = PackedArrays(*((array.dtype.type, array.shape) for array in mixed))
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for place, array in zip(layout.in_host(buffer.numpy()), mixed, strict=True):
        place[...] = array
    assert all(
        torch.equal(got, torch.from_numpy(array)) for got, array in zip(layout.on_device(buffer), mixed, strict=True)
    )
    (view,) = to_device([here[0]], torch.device("cpu"))
    assert view.data_ptr() == here[0].ctypes.data  # Nothing has to cross.


def test_only_cuda_has_graphs() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert graph_bytes(None, cuda, 64 * 2**30) == 2 * 2**30
    assert graph_bytes(10, cuda, 64 * 2**30) == 10
    assert graph_bytes(0, cuda, 64 * 2**30) == graph_bytes(0, cpu, 2**30) == graph_bytes(None, cpu, 2**30) == 0
    with pytest.raises(ConfigError, match=r"gpu\.graph_bytes is 5"):
        graph_bytes(GpuConfig(graph_bytes=5).graph_bytes, cpu, 2**30)
    assert graph_options(0, cuda) is None
