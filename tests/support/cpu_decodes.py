"""Decodes on the host tier, driven as gpu_svc drives them, each step compared with the formula."""

import numpy as np

from support.cpu_attention import TOLERANCE, attention, decode, encode, from_blocks, to_blocks
from svc_common.tensor_plane import CpuSubBatch, RegionShape, Report, TensorPlane

SHAPE = RegionShape(
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=32,
    block_tokens=4,
    kv_dtype="fp32",
    exchange_dtype="fp32",
    max_sequences=8,
    softmax_scale=0.2,
)
TIMEOUT_S = 10.0


class Decodes:
    """Sequences that grow by a token each iteration, in two sub-batches, beside the same in float64."""

    def __init__(self, plane: TensorPlane, shape: RegionShape, num_sequences: tuple[int, int], seed: int = 0) -> None:
        self.plane = plane
        self.shape = shape
        self.random = np.random.default_rng(seed)
        self.iteration = 0
        stride = 16
        blocks = self.random.permutation(plane.num_blocks)[: sum(num_sequences) * stride].astype(np.int32)
        tables = blocks.reshape(-1, stride)
        self.tables = [tables[: num_sequences[0]], tables[num_sequences[0] :]]
        self.contexts = [self.random.integers(0, 10, n).astype(np.int32) for n in num_sequences]
        by_token = (*plane.pool.shape[:-1], shape.block_tokens, shape.head_dim)
        plane.pool[:] = to_blocks(self.random.standard_normal(by_token), shape.kv_dtype)
        self.pool = from_blocks(plane.pool, shape.head_dim)

    def submit(self, slot: int) -> tuple[int, np.ndarray]:  # type: ignore[type-arg]
        """Fills the slot for one layer; returns what is needed to compare."""
        plane, shape, n = self.plane, self.shape, len(self.contexts[slot])
        q = encode(self.random.standard_normal((n, shape.num_q_heads, shape.head_dim)), shape.exchange_dtype)
        kv = encode(self.random.standard_normal((2, n, shape.num_kv_heads, shape.head_dim)), shape.exchange_dtype)
        if slot == 0:
            plane.q(slot)[:n], plane.k(slot)[:n], plane.v(slot)[:n] = q, kv[0], kv[1]
            plane.submit(slot)
        else:
            plane.submit_rows(slot, q, kv.swapaxes(0, 1), 0, n)
        return n, np.concatenate([decode(q), *decode(kv)], axis=1)

    def wait(self, slot: int) -> np.ndarray:  # type: ignore[type-arg]
        """Attention of the slot's last submit; slot 0 is read in place, slot 1 through rows that are not contiguous."""
        n = len(self.contexts[slot])
        if slot == 0:
            self.plane.wait(slot, TIMEOUT_S)
            return self.plane.out(slot)[:n]
        out = np.zeros((n + 3, 2 * self.shape.num_q_heads, self.shape.head_dim), self.plane.out(slot).dtype)
        self.plane.wait_rows(slot, out[:, ::2], 2, n, TIMEOUT_S)
        assert not out[:2].any()
        assert not out[n + 2 :].any()
        assert not out[:, 1::2].any()
        return out[2 : n + 2, ::2]

    def check(self, slot: int, layer: int, sent: np.ndarray, out: np.ndarray) -> None:  # type: ignore[type-arg]
        """What a submit was answered with, and the new token in the pool."""
        shape, context, tables = self.shape, self.contexts[slot], self.tables[slot]
        q, k, v = np.split(sent, [shape.num_q_heads, shape.num_q_heads + shape.num_kv_heads], axis=1)
        kv = decode(encode(np.stack([k, v], axis=1), shape.kv_dtype))
        last = context - 1
        blocks = tables[np.arange(len(context)), last // shape.block_tokens]
        self.pool[layer, blocks, :, :, last % shape.block_tokens] = kv
        window = shape.sliding_windows[layer] if shape.sliding_windows else 0
        want = attention(q, self.pool[layer], tables, context, shape.softmax_scale, window, shape.softcap)
        got = decode(out)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[shape.exchange_dtype])

    def run_iteration(self) -> Report:
        """Both sub-batches, the second submitted while the first is computed."""
        self.iteration += 1
        for context in self.contexts:
            context += 1
        slots = [slot for slot in (1, 0) if len(self.contexts[slot])]
        self.plane.begin(
            self.iteration,
            [CpuSubBatch(s, self.contexts[s], self.tables[s]) for s in slots],
            sum(map(len, self.tables)),
        )
        for layer in range(self.shape.num_layers):
            sent = {slot: self.submit(slot)[1] for slot in slots}
            for slot in slots:
                self.check(slot, layer, sent[slot], self.wait(slot))
        report = self.plane.finish(TIMEOUT_S)
        pool = from_blocks(self.plane.pool, self.shape.head_dim)
        np.testing.assert_array_equal(pool, self.pool, "nothing else was written")
        return report
