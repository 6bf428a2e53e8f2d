"""Decodes on the host tier, driven as gpu_svc drives them, each step compared with the formula."""

import numpy as np

from support.cpu_attention import TOLERANCE, Pool, attention, decode, encode, to_pool
from support.kernels import INT16_TOLERANCE
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
        pool = to_pool(self.random.standard_normal(by_token), shape.kv_dtype)
        plane.pool[:] = pool.blocks
        if plane.scales is not None:
            plane.scales[:] = pool.scales
        self.pool = self._values()

    def _values(self) -> np.ndarray:  # type: ignore[type-arg]
        """What the shared pool holds."""
        return Pool(self.plane.pool, self.plane.scales).values(self.shape.head_dim)

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
        kv = np.stack([k, v], axis=1)
        if self.plane.scales is None:
            kv = decode(encode(kv, shape.kv_dtype))
        last = context - 1
        blocks = tables[np.arange(len(context)), last // shape.block_tokens]
        self.pool[layer, blocks, :, :, last % shape.block_tokens] = kv
        tolerance = TOLERANCE[shape.exchange_dtype]
        if self.plane.scales is not None:
            self._take_rounded(self.plane.scales, layer, blocks, last % shape.block_tokens)
            tolerance += INT16_TOLERANCE
        window = shape.sliding_windows[layer] if shape.sliding_windows else 0
        want = attention(q, self.pool[layer], tables, context, shape.softmax_scale, window, shape.softcap)
        np.testing.assert_allclose(decode(out), want, rtol=0, atol=tolerance)

    def _take_rounded(self, scales: np.ndarray, layer: int, blocks: np.ndarray, offsets: np.ndarray) -> None:  # type: ignore[type-arg]
        """Tokens of blocks that were appended to at `offsets` are at most half a scale from what they were."""
        rounded = self._values()[layer, blocks]
        errors = np.abs(rounded - self.pool[layer, blocks]).max(axis=-1)  # [n, 2, num_kv_heads, block_tokens]
        counts = np.arange(self.shape.block_tokens) <= offsets[:, None, None, None]
        assert (errors * counts <= scales[layer, blocks][..., None] / 2 * (1 + 5e-5)).all()
        self.pool[layer, blocks] = rounded

    def run_iteration(self, layers: range | None = None) -> Report:
        """Both sub-batches, the second submitted while the first is computed; through `layers`, or through all.

        The first layer begins a new token.
        """
        self.iteration += 1
        through = range(self.shape.num_layers) if layers is None else layers
        if through.start == 0:
            for context in self.contexts:
                context += 1
        slots = [slot for slot in (1, 0) if len(self.contexts[slot])]
        self.plane.begin(
            self.iteration,
            [CpuSubBatch(s, self.contexts[s], self.tables[s]) for s in slots],
            sum(map(len, self.tables)),
            layers=layers,
        )
        for layer in through:
            sent = {slot: self.submit(slot)[1] for slot in slots}
            for slot in slots:
                self.check(slot, layer, sent[slot], self.wait(slot))
        report = self.plane.finish(TIMEOUT_S)
        np.testing.assert_array_equal(self._values(), self.pool, "nothing else was written")
        return report
