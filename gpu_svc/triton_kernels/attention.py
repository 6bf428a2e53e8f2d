"""Triton kernels of attention over KV in blocks: prompts' chunks, and decodes split over their context.

Rows of a program are query heads of one KV head, token by token: a decode has as many as the group has heads, a chunk
that many times its tokens. Softmax is computed on the way (Milakov and Gimelshein, 2018), in base 2. How keys and
values lie in a block: gpu_svc/kv_layout.py. Names in capitals are compile-time constants.
"""

import triton
import triton.language as tl


@triton.jit
def _scores(
    q,  # [ROWS, DIM_PAD]
    keys,  # of the layer, at this KV head's part of block 0
    places,  # [TILE] of each token's dimension 0, counted from there; without `within` times the step between tokens
    within,  # [TILE] of each token in its block
    here,  # [TILE]
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAIRED_KEYS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """[ROWS, TILE]. Neighbours in memory are tokens, so that is what a thread reads in one piece."""
    if PAIRED_KEYS:
        # Two dimensions of a token are one word: even and odd ones are multiplied by themselves.
        HALF: tl.constexpr = DIM_PAD // 2
        even, odd = tl.split(tl.reshape(q, [ROWS, HALF, 2]))
        pairs = tl.arange(0, HALF)
        words = keys.to(tl.pointer_type(tl.int32)) + (places // 2 + within)[None, :] + pairs[:, None] * BLOCK_TOKENS
        word = tl.load(words, mask=(pairs < HEAD_DIM // 2)[:, None] & here[None, :], other=0)
        low = word.to(tl.int16).to(tl.bfloat16, bitcast=True).to(q.dtype).to(DOT_TYPE)
        high = (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True).to(q.dtype).to(DOT_TYPE)
        scores = tl.dot(even.to(DOT_TYPE), low, input_precision="ieee")
        return tl.dot(odd.to(DOT_TYPE), high, scores, input_precision="ieee")
    dims = tl.arange(0, DIM_PAD)
    numbers = keys + (places + within)[None, :] + dims[:, None] * BLOCK_TOKENS
    found = tl.load(numbers, mask=(dims < HEAD_DIM)[:, None] & here[None, :], other=0.0)
    return tl.dot(q.to(DOT_TYPE), found.to(q.dtype).to(DOT_TYPE), input_precision="ieee")


@triton.jit
def _attend(
    q,  # [ROWS, DIM_PAD]
    positions,  # [ROWS] of each row's token; it sees tokens up to its own
    table,  # blocks of the sequence
    cache,  # of the layer, at this KV head's part of block 0
    block_stride,
    value_offset,  # from a block's keys to its values
    start,
    end,  # of the tokens attended here
    window,
    scale,  # of scores, log2(e) not included
    softcap,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAIRED_KEYS: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Weighted sum of values [ROWS, DIM_PAD], not yet divided; the largest score and the sum of weights, [ROWS]."""
    log2_e = 1.4426950408889634
    dims = tl.arange(0, DIM_PAD)
    summed = tl.zeros([ROWS, DIM_PAD], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(start // RUN * RUN, end, TILE):
        tokens = tl.multiple_of(first, RUN) + tl.arange(0, TILE)
        here = (tokens >= start) & (tokens < end)
        # Keys are read run by run: what lies beyond the end in the same block is a token nobody sees.
        run_here = tokens // RUN * RUN < end
        blocks = tl.load(table + tokens // BLOCK_TOKENS, mask=run_here, other=0).to(tl.int64)
        blocks = tl.max_constancy(blocks * block_stride, RUN)
        within = tokens % BLOCK_TOKENS
        scores = (
            _scores(q, cache, blocks, within, run_here, HEAD_DIM, DIM_PAD, ROWS, BLOCK_TOKENS, PAIRED_KEYS, DOT_TYPE)
            * scale
        )
        if HAS_SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
        seen = here[None, :] & (tokens[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores * log2_e, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has no finite peak.
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(peak - reference)
        value_places = blocks[:, None] + value_offset + within[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(cache + value_places, mask=here[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        values = values.to(q.dtype).to(DOT_TYPE)
        summed = summed * shrink[:, None] + tl.dot(weights.to(q.dtype).to(DOT_TYPE), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    return summed, peak, total


@triton.jit(do_not_specialize=["start", "num_tokens"], do_not_specialize_on_alignment=["table"])
def prefill_kernel(
    q,
    cache,
    table,
    out,
    start,
    num_tokens,
    window,
    scale,
    softcap,
    q_token_stride,
    out_token_stride,
    block_stride,
    value_offset,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAIRED_KEYS: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Programs: (tiles of ROWS rows, last ones first, for they have most to do; KV heads)."""
    kv_head = tl.program_id(1)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    row_tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    here = (row_tokens < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + row_tokens[:, None].to(tl.int64) * q_token_stride + places, mask=here, other=0.0)
    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, num_tokens - 1)
    first_seen = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(start + first_row // GROUP - window + 1, 0)
    summed, _, total = _attend(
        queries,
        start + row_tokens,
        table,
        cache + kv_head * HEAD_DIM * BLOCK_TOKENS,
        block_stride,
        value_offset,
        first_seen,
        start + last_token + 1,
        window,
        scale,
        softcap,
        HEAD_DIM,
        DIM_PAD,
        BLOCK_TOKENS,
        PAIRED_KEYS,
        RUN,
        TILE,
        ROWS,
        HAS_WINDOW,
        HAS_SOFTCAP,
        DOT_TYPE,
    )
    # Rows past the chunk's end may have seen nothing.
    attended = (summed / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + row_tokens[:, None].to(tl.int64) * out_token_stride + places, attended, mask=here)


@triton.jit(
    do_not_specialize=["min_split_tokens", "table_stride"],
    do_not_specialize_on_alignment=["tables", "context_tokens"],
)
def decode_kernel(
    q,
    cache,
    tables,
    context_tokens,
    summed_out,  # [n, num_q_heads, num_splits, HEAD_DIM] float32
    logs_out,  # [n, num_q_heads, num_splits] float32: log2 of the sum of weights
    window,
    scale,
    softcap,
    min_split_tokens,
    q_token_stride,
    table_stride,
    block_stride,
    value_offset,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAIRED_KEYS: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Programs: (sequences, KV heads, equal parts of each sequence's context, counted from the first token seen).

    A part has `min_split_tokens` or more: of a short context the last ones are empty.
    """
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    context = tl.load(context_tokens + sequence)
    first_seen = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(context - window, 0)
    split_tokens = tl.maximum(tl.cdiv(context - first_seen, num_splits), min_split_tokens)
    start = first_seen + split * split_tokens
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    heads = kv_head * GROUP + rows
    here = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + sequence * q_token_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=here, other=0.0)
    summed, peak, total = _attend(
        queries,
        tl.zeros([ROWS], tl.int32) + context - 1,
        tables + sequence * table_stride,
        cache + kv_head * HEAD_DIM * BLOCK_TOKENS,
        block_stride,
        value_offset,
        start,
        tl.minimum(start + split_tokens, context),
        window,
        scale,
        softcap,
        HEAD_DIM,
        DIM_PAD,
        BLOCK_TOKENS,
        PAIRED_KEYS,
        RUN,
        TILE,
        ROWS,
        HAS_WINDOW,
        HAS_SOFTCAP,
        DOT_TYPE,
    )
    num_heads = GROUP * tl.num_programs(1)
    part = (sequence * num_heads + heads) * num_splits + split
    # A part beyond the context's end is empty: its weight will be 0.
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    summed = summed / total[:, None]
    tl.store(summed_out + part[:, None] * HEAD_DIM + dims[None, :], summed, mask=here)
    tl.store(logs_out + part, tl.where(seen, peak + tl.log2(total), float("-inf")), mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    summed,
    logs,
    out,
    out_token_stride,
    num_splits,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,  # at a time
):
    """Programs: (sequences, query heads). Adds up the parts of a context, each by its share of the weights."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, DIM_PAD)
    first_part = (sequence * tl.num_programs(1) + head) * num_splits
    attended = tl.zeros([DIM_PAD], tl.float32)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for first in range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        part_logs = tl.load(logs + first_part + splits, mask=splits < num_splits, other=float("-inf"))
        # The first part of a context is never empty, so from the first turn on this is a number.
        new_peak = tl.maximum(peak, tl.max(part_logs, 0))
        shares = tl.exp2(part_logs - new_peak)
        shrink = tl.exp2(peak - new_peak)
        here = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(summed + (first_part + splits)[:, None] * HEAD_DIM + dims[None, :], mask=here, other=0.0)
        attended = attended * shrink + tl.sum(parts * shares[:, None], 0)
        total = total * shrink + tl.sum(shares, 0)
        peak = new_peak
    attended = (attended / total).to(out.dtype.element_ty)
    tl.store(out + sequence * out_token_stride + head * HEAD_DIM + dims, attended, mask=dims < HEAD_DIM)
