"""Triton's kernels, in its interpreter, against attention written out in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gpu import CPU, Driver, open_model
from support.paged_attention import HEAD_DIM, fill, plain, spec
from support.reference import Reference

from gpu_svc.attention.launches import Gpu
from gpu_svc.attention.torch_backend import _TorchPrefill
from gpu_svc.attention.triton_backend import TritonAttention, _TritonPrefill
from gpu_svc.kv_cache import KvShape, write_kv_by_index
from gpu_svc.kv_layout import KvBlocks
from gpu_svc.triton_ops import TritonOps, append_kv
from svc_common.decoder.dtypes import DTYPES
from svc_common.decoder.load import load_weights
from svc_common.decoder.ops import TorchOps
from svc_common.decoder.torch_decoder import TorchDecoder
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles
from svc_common.plan import SubBatch

HEADS = st.sampled_from([(4, 4), (6, 2), (9, 3), (20, 1)])
BLOCK_TOKENS = st.sampled_from([1, 6, 16])
WINDOWS = st.sampled_from([None, 1, 7, 64])
SOFTCAPS = st.sampled_from([0.0, 0.0, 1.5])
CACHE_TYPES = st.sampled_from(["fp32", "fp16", "bf16"])


def backend(heads: tuple[int, int], window: int | None, softcap: float, block_tokens: int) -> TritonAttention:
    return TritonAttention(spec(*heads, window, softcap), block_tokens, torch.float32, CPU)


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    heads=HEADS,
    block_tokens=BLOCK_TOKENS,
    window=WINDOWS,
    softcap=SOFTCAPS,
    dtype=CACHE_TYPES,
)
def test_decode(
    lengths: list[int], heads: tuple[int, int], block_tokens: int, window: int | None, softcap: float, dtype: str
) -> None:
    torch.manual_seed(0)
    blocks, tables, sequences = fill(lengths, heads[1], block_tokens, dtype)
    q = torch.randn(len(lengths), heads[0] + 3, HEAD_DIM)[:, : heads[0]]  # Part of a wider row, as the decoder's is.
    work = backend(heads, window, softcap, block_tokens).decode(np.array(lengths), tables)
    for layer, layer_window in enumerate((window, None)):
        out = torch.full(q.shape, float("nan"))
        work.run(layer, q, blocks, out)
        for i, (k, v) in enumerate(sequences):
            expected = plain(q[i : i + 1], k, v, torch.tensor([lengths[i] - 1]), layer_window, softcap)
            torch.testing.assert_close(out[i : i + 1].double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(
    start=st.integers(0, 200),
    num_tokens=st.integers(1, 60),
    heads=HEADS,
    block_tokens=BLOCK_TOKENS,
    window=WINDOWS,
    softcap=SOFTCAPS,
    dtype=CACHE_TYPES,
)
def test_prefill(
    start: int,
    num_tokens: int,
    heads: tuple[int, int],
    block_tokens: int,
    window: int | None,
    softcap: float,
    dtype: str,
) -> None:
    torch.manual_seed(0)
    end = start + num_tokens
    blocks, tables, (kv,) = fill([end], heads[1], block_tokens, dtype)
    q = torch.randn(num_tokens, heads[0] + 2, HEAD_DIM)[:, : heads[0]]
    attention = backend(heads, window, softcap, block_tokens).prefill(start, num_tokens, tables[0])
    for layer, layer_window in enumerate((window, None)):
        expected = plain(q, *kv, torch.arange(start, end), layer_window, softcap)
        out, on_host = torch.full(q.shape, float("nan")), torch.full(q.shape, float("nan"))
        attention.run(layer, q, blocks, out)
        attention.run_on_host(layer, q, KvBlocks(blocks), kv[:, start:].transpose(0, 1), on_host)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(on_host.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_only_the_result_is_rounded_further(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    blocks, tables, ((k, v),) = fill([300], 2, 16, "bf16" if dtype == torch.bfloat16 else "fp16")
    q = torch.randn(1, 6, HEAD_DIM).to(dtype)
    attention = TritonAttention(spec(6, 2), 16, dtype, CPU)
    out = torch.full_like(q, float("nan"))
    attention.decode(np.array([300]), tables).run(1, q, blocks, out)
    expected = plain(q.float(), k, v, torch.tensor([299]), None, 0.0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=2 * eps, atol=2 * eps)


def test_prompts_on_turing_are_torchs() -> None:
    """Whose kernels use its tensor cores; in fp32 nobody's do."""
    torch.manual_seed(0)
    turing = Gpu(capability=75, num_processors=40)
    for dtype, kind in ((torch.float16, _TorchPrefill), (torch.float32, _TritonPrefill)):
        blocks, tables, (kv,) = fill([40], 2, 16, "fp16")
        q = torch.randn(5, 6, HEAD_DIM).to(dtype)
        attention = TritonAttention(spec(6, 2), 16, dtype, CPU, turing).prefill(35, 5, tables[0])
        assert isinstance(attention, kind)
        out = torch.full_like(q, float("nan"))
        attention.run(1, q, blocks, out)
        expected = plain(q.float(), *kv, torch.arange(35, 40), None, 0.0)
        limit = max(4 * torch.finfo(dtype).eps, 1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


ELEMENTS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def close(ours: torch.Tensor, torchs: torch.Tensor) -> None:
    """Torch rounds its intermediate results in 16 bits, too, and the interpreter cuts bf16 off where a GPU rounds."""
    eps = torch.finfo(torchs.dtype).eps
    torch.testing.assert_close(ours, torchs, rtol=4 * eps, atol=4 * eps)


@ELEMENTS
@pytest.mark.parametrize("size", [16, 100])
def test_norms(dtype: torch.dtype, size: int) -> None:
    rows, added, weight = numbers(5, size, dtype=dtype), numbers(6, size, dtype=dtype)[:5], numbers(size, dtype=dtype)
    close(TritonOps().rms_norm(rows, weight, 1e-5), TorchOps().rms_norm(rows, weight, 1e-5))
    ours, torchs = rows.clone(), rows.clone()
    normed = TritonOps().add_rms_norm_(ours, added, weight, 1e-5)
    expected = TorchOps().add_rms_norm_(torchs, added, weight, 1e-5)
    close(ours, torchs)
    close(normed, expected)


def test_norm_of_heads_within_wider_rows() -> None:
    heads, weight = numbers(4, 9, 24)[:, 2:7], numbers(24)
    close(TritonOps().rms_norm(heads, weight, 1e-5), TorchOps().rms_norm(heads, weight, 1e-5))
    close(TritonOps().rms_norm(heads[:, :1], weight, 1e-5), TorchOps().rms_norm(heads[:, :1], weight, 1e-5))


@ELEMENTS
@pytest.mark.parametrize("rotary_dim", [8, 24])
def test_rotation(dtype: torch.dtype, rotary_dim: int) -> None:
    wider, angles = numbers(4, 9, 24, dtype=dtype), numbers(4, 1, rotary_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    ours, torchs = wider.clone(), wider.clone()
    TritonOps().rotate_(ours[:, :7], cos, sin)
    TorchOps().rotate_(torchs[:, :7], cos, sin)
    close(ours, torchs)


@ELEMENTS
def test_gate(dtype: torch.dtype) -> None:
    inner = numbers(3, 2 * 1500, dtype=dtype)
    close(TritonOps().silu_gate(inner), TorchOps().silu_gate(inner))
    assert TritonOps().silu_gate(inner[:0]).shape == (0, 1500)


@pytest.mark.parametrize("cache", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 15])
def test_keys_and_values_are_stored_as_torch_stores_them(cache: str, head_dim: int) -> None:
    # Part of the rows that hold q, too; numbers that the cache holds as they are.
    kv = numbers(5, 9, head_dim, dtype=DTYPES[cache]).float()[:, 3:].unflatten(1, (2, 3))
    blocks, offsets = torch.tensor([0, 3, 3, 2, 0]), torch.tensor([5, 0, 1, 3, 4])
    ours, torchs = (torch.zeros(4, 2, 3, 6 * head_dim, dtype=DTYPES[cache]) for _ in range(2))
    append_kv(ours, blocks, offsets, kv)
    write_kv_by_index(torchs, blocks, offsets, kv)
    assert torch.equal(ours, torchs)
    append_kv(ours, blocks[:0], offsets[:0], kv[:0])
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_whole_models_yield_the_reference_tokens(
    variant: str,
    checkpoint: Callable[[str], ModelFiles],
    reference: Callable[[str], Reference],
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The executor with everything that is Triton's: norms, rotation, gates, attention; a sliding window and a cap."""

    def make_triton(model: ModelSpec, shape: KvShape, dtype: torch.dtype, device: torch.device) -> TritonAttention:
        return TritonAttention(model, shape.block_tokens, dtype, device)

    monkeypatch.setattr("gpu_svc.epoch.make_backend", make_triton)
    model, opened = open_model(checkpoint(variant))
    driver = make_driver(TorchDecoder(model, load_weights(opened, model, torch.float32, CPU), TritonOps()))
    prompts = {1: list(range(3, 24)), 2: [7, 5, 3]}
    for sequence_id, prompt in prompts.items():
        driver.prefill(sequence_id, prompt, chunk_tokens=8)
    for _ in range(4):
        driver.run(SubBatch(gpu_decodes=(1, 2)))
    for sequence_id, prompt in prompts.items():
        assert driver.tokens[sequence_id] == reference(variant).greedy(prompt, 5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_cache_of_more_numbers_than_32_bits_count(dtype: str) -> None:
    """Its memory is only touched where the sequence lies, at the end."""
    block_tokens, num_tokens, kv_heads = 16, 20, 2
    numbers_each = 2 * kv_heads * block_tokens * HEAD_DIM
    num_blocks = 2**31 // numbers_each + 2
    blocks = torch.empty(num_blocks, 2, kv_heads, block_tokens * HEAD_DIM, dtype=DTYPES[dtype])
    blocks[-2:] = float("nan")  # Behind the sequence nothing counts.
    table = torch.tensor([num_blocks - 1, num_blocks - 2])
    kv, q = numbers(num_tokens, 2, kv_heads, HEAD_DIM, dtype=DTYPES[dtype]), numbers(1, 4, HEAD_DIM)
    positions = torch.arange(num_tokens)
    append_kv(blocks, table[positions // block_tokens], positions % block_tokens, kv)
    attention, tables = backend((4, kv_heads), None, 0.0, block_tokens), table[None].numpy().astype(np.int32)
    expected = plain(q, *kv.float().unbind(1), torch.tensor([num_tokens - 1]), None, 0.0)
    decoded, prefilled = torch.empty_like(q), torch.empty_like(q)
    attention.decode(np.array([num_tokens]), tables).run(1, q, blocks, decoded)
    attention.prefill(num_tokens - 1, 1, tables[0]).run(1, q, blocks, prefilled)
    torch.testing.assert_close(decoded.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prefilled.double(), expected, rtol=1e-4, atol=1e-5)
