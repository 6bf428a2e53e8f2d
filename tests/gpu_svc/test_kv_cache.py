"""Writes into blocks: by the kernels and by torch's own operations, against a plain copy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_attention import from_blocks

from gpu_svc.kv_cache import KvPlaces, write_kv, write_kv_by_index
from gpu_svc.kv_layout import KvBlocks, keys_by_token
from svc_common.cpu_kernels import ThreadPool
from svc_common.cpu_kernels import write_kv as write_kv_natively
from svc_common.decoder.dtypes import DTYPES
from svc_common.tensor_plane import PlaneError

NUM_BLOCKS = 6


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 80),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 8, 15, 64]),
    block_tokens=st.sampled_from([16, 21]),
    kv_dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
)
def test_both_ways_store_the_same(
    num_tokens: int, num_kv_heads: int, head_dim: int, block_tokens: int, kv_dtype: str, dtype: str
) -> None:
    torch.manual_seed(0)
    # As the decoder hands K and V over: part of a wider row.
    kv = torch.randn(num_tokens, 2 * num_kv_heads + 3, head_dim, dtype=torch.float32).to(DTYPES[dtype])
    kv = kv[:, 3:].view(num_tokens, 2, num_kv_heads, head_dim)
    places = torch.randperm(NUM_BLOCKS * block_tokens)[:num_tokens]
    blocks, offsets = places // block_tokens, places % block_tokens
    layers = torch.full((2, NUM_BLOCKS, 2, num_kv_heads, block_tokens * head_dim), 7.0, dtype=DTYPES[kv_dtype])
    write_kv(KvBlocks(layers[0]), KvPlaces.on(torch.device("cpu"), blocks.numpy(), offsets.numpy()), kv)
    write_kv_by_index(layers[1], blocks, offsets, kv)
    want = np.full((NUM_BLOCKS, 2, num_kv_heads, block_tokens, head_dim), 7.0)
    want[blocks.numpy(), :, :, offsets.numpy()] = kv.to(DTYPES[kv_dtype]).double().numpy()
    for layer in layers:
        bits = layer.view(torch.uint16) if kv_dtype == "bf16" else layer
        np.testing.assert_array_equal(from_blocks(bits.numpy(), head_dim), want)
        np.testing.assert_array_equal(keys_by_token(layer[:, 0], head_dim).double().numpy(), want[:, 0])


def test_places_are_checked_before_anything_is_written() -> None:
    layer, kv = torch.zeros(2, 2, 1, 32), torch.ones(2, 2, 1, 8)
    threads = ThreadPool(1)

    def write(blocks: list[int], offsets: list[int], kv: torch.Tensor = kv) -> None:
        write_kv_natively(threads, layer, np.array(blocks, np.int32), np.array(offsets, np.int32), kv, "auto")

    with pytest.raises(PlaneError, match="token 1: block 2 of 2"):
        write([0, 2], [0, 0])
    with pytest.raises(PlaneError, match="token 0: block -1 of 2"):
        write([-1, 0], [0, 0])
    with pytest.raises(PlaneError, match="token 1: offset 4 in a block of 4"):
        write([0, 1], [0, 4])
    with pytest.raises(ValueError, match="differ in length"):
        write([0], [0])
    with pytest.raises(ValueError, match="does not fit layer"):
        write([0, 1], [0, 0], torch.ones(2, 2, 1, 9))
    with pytest.raises(ValueError, match="not contiguous"):
        write([0, 1], [0, 0], torch.ones(2, 2, 8, 1).transpose(2, 3))
    with pytest.raises(TypeError, match="float32"):
        write([0, 1], [0, 0], kv.double())
    assert layer.eq(0).all()
    write([0, 1], [0, 3])
    assert layer.sum() == kv.sum()
