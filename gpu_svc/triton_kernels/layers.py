"""Triton kernels of the small operations of a layer. Names in capitals are compile-time constants."""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    rows,
    added,
    weight,
    out,
    token_stride,
    added_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    places = tl.arange(0, SIZE_PAD)
    here = places < SIZE
    source = rows + token * token_stride + head * head_stride + places
    numbers = tl.load(source, mask=here, other=0.0)
    if HAS_ADDED:
        # Rounded before its norm is taken, as what is kept is.
        more = tl.load(added + token * added_stride + places, mask=here, other=0.0).to(tl.float32)
        numbers = (numbers.to(tl.float32) + more).to(numbers.dtype)
        tl.store(source, numbers, mask=here)
    numbers = numbers.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    normed = numbers * scale * tl.load(weight + places, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + places, normed.to(out.dtype.element_ty), mask=here)


@triton.jit
def rotate_kernel(
    heads,
    cos,
    sin,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEADS_PAD), tl.arange(0, HALF_PAD)
    turned = place < HALF
    here = (head < NUM_HEADS)[:, None] & turned[None, :]
    cosines = tl.load(cos + token * HALF + place, mask=turned, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + token * HALF + place, mask=turned, other=0.0).to(tl.float32)[None, :]
    source = heads + token * token_stride + head[:, None] * head_stride + place[None, :]
    first = tl.load(source, mask=here, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=here, other=0.0).to(tl.float32)
    element = heads.dtype.element_ty
    tl.store(source, (first * cosines - second * sines).to(element), mask=here)
    tl.store(source + HALF, (second * cosines + first * sines).to(element), mask=here)


@triton.jit
def silu_gate_kernel(inner, out, row_stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = places < SIZE
    gate = tl.load(inner + row * row_stride + places, mask=here, other=0.0).to(tl.float32)
    up = tl.load(inner + row * row_stride + SIZE + places, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + places, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize_on_alignment=["blocks", "offsets"])
def append_kernel(
    kv,
    cache,
    blocks,
    offsets,
    kv_token_stride,
    kv_part_stride,
    kv_head_stride,
    block_stride,
    part_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAIRED_KEYS: tl.constexpr,
):
    """Programs: (tokens, K or V)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_paired: tl.constexpr = HEAD_DIM // 2 * 2 if PAIRED_KEYS else 0
    heads, dims = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    here = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    source = kv + token * kv_token_stride + part * kv_part_stride + heads[:, None] * kv_head_stride + dims[None, :]
    numbers = tl.load(source, mask=here, other=0.0)
    block, offset = tl.load(blocks + token), tl.load(offsets + token)
    as_key = dims * BLOCK_TOKENS + offset
    as_key = tl.where(dims < num_paired, dims // 2 * (2 * BLOCK_TOKENS) + 2 * offset + dims % 2, as_key)
    within = tl.where(part == 0, as_key, offset * HEAD_DIM + dims)
    target = cache + block * block_stride + part * part_stride + heads[:, None] * (BLOCK_TOKENS * HEAD_DIM)
    tl.store(target + within[None, :], numbers.to(cache.dtype.element_ty), mask=here)
