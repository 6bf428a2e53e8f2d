"""What computing takes beside weights and KV, from shapes: the most that is alive at a time, for the largest batch."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gpu_svc.device_kernels import has_triton
from gpu_svc.limits import Limits
from gpu_svc.prompt_logprobs import PIECE_TOKENS
from gpu_svc.sampling import MOST_DRAWN
from svc_common.model.spec import ModelSpec

_FP32 = 4
_GROWTH = 2
"""A native buffer that grows by a little may take twice what it holds."""
_COPY_BYTES = 2 * _FP32
"""Of a logit beside itself: what log-probabilities are to be of, and these; or rows that penalties change."""
_DRAWN_BYTES = 88
"""Of each logit that is drawn from: 16 for it scaled, its weight and two selections, 44 while they are sorted, for
weights, sums and differences in fp64 and a count; the rest for gaps between these that an allocator leaves."""
_TOKEN_BYTES = 256
"""Ids, positions and places, on both sides."""
FIXED_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
"""Scratch of kernels and of matrix products, whatever the batch; on a GPU also of blocks on their way between the
tiers, and of measuring the link."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Of one model as one executor computes it."""

    spec: ModelSpec
    device: torch.device
    weight_dtype: torch.dtype
    host_dtype: torch.dtype | None
    """Of KV on the host; None where there is no host tier."""

    def num_bytes(self, limits: Limits) -> int:
        """On the device, at most. On "cpu" beside what a process takes that computes nothing."""
        # What a cohort computes counts by itself, and its hidden states rest between iterations.
        cohort = limits.max_sequences if self.host_dtype is not None else 0
        tokens = limits.max_batch_tokens + cohort
        per_token = self._cpu_token_bytes if self.device.type == "cpu" else self._cuda_token_bytes
        outputs = 2 * limits.max_sequences * self.spec.hidden_size * _FP32
        sampling = self._sampling_bytes(limits)
        return tokens * per_token + outputs + sampling + self.chunk_bytes(limits) + FIXED_BYTES[self.device.type]

    @property
    def _inner_size(self) -> int:
        return max(_inner_sizes(self.spec))

    @property
    def _qkv_size(self) -> int:
        return (self.spec.num_q_heads + 2 * self.spec.num_kv_heads) * self.spec.head_dim

    @property
    def _rotation_bytes(self) -> int:
        """Angles, cosines and sines of all kinds of layers, and their intermediate results."""
        kinds = {layer.rope for layer in self.spec.layers if layer.rope is not None}
        return sum(3 * _FP32 * rope.rotary_dim for rope in kinds)

    @property
    def _cpu_token_bytes(self) -> int:
        """All in fp32: hidden states, q, k, v, and attention's output; native code's norms, branch and inner rows."""
        spec, inner = self.spec, self._inner_size
        attended = spec.num_q_heads * spec.head_dim
        native = 2 * spec.hidden_size + inner
        if spec.experts is not None:
            native += spec.hidden_size + 3 * spec.experts.num_experts
        own = spec.hidden_size + self._qkv_size + attended + 2 * spec.num_kv_heads * spec.head_dim
        rounded = 2 * max(spec.hidden_size, inner, attended) if self.weight_dtype != torch.float32 else 0
        return _FP32 * own + _GROWTH * (_FP32 * native + rounded) + self._rotation_bytes + _TOKEN_BYTES

    @property
    def _cuda_token_bytes(self) -> int:
        """In the compute type: hidden states, what is added to them, both normalised and as the MLP's rows; q, k, v and
        attention's output; the MLP's inner rows, gates, products. Norms are computed in fp32.
        """
        spec, inner = self.spec, self._inner_size
        numbers = 6 * spec.hidden_size + self._qkv_size + spec.num_q_heads * spec.head_dim + 4 * inner
        in_fp32 = 2 * spec.hidden_size
        if spec.experts is not None:
            numbers += 3 * spec.hidden_size
            in_fp32 += spec.hidden_size + 4 * spec.experts.num_experts
        return self.weight_dtype.itemsize * numbers + _FP32 * in_fp32 + self._rotation_bytes + _TOKEN_BYTES

    def _sampling_bytes(self, limits: Limits) -> int:
        """Logits of one token of each sequence, or of a piece of a prompt, and what is drawn from at a time."""
        vocab_size = self.spec.vocab_size
        rows = limits.max_sequences * vocab_size
        piece = min(PIECE_TOKENS, limits.max_batch_tokens) * vocab_size
        drawn = min(rows, max(vocab_size, MOST_DRAWN[self.device.type]))
        return _FP32 * max(rows, piece) + max(_COPY_BYTES * max(rows, piece), _FP32 * rows + _DRAWN_BYTES * drawn)

    def chunk_bytes(self, limits: Limits) -> int:
        """Of a chunk of a prompt whose past lies on the host: a GPU fetches that, converts it and joins it with the
        chunk's own, and masks what each token does not see; without Triton also where it lies on the GPU. A CPU attends
        where it lies.
        """
        if self.device.type == "cpu" or (self.host_dtype is None and has_triton(self.device)):
            return 0
        kv_numbers = 2 * self.spec.num_kv_heads * self.spec.head_dim
        past, dtype = limits.max_sequence_tokens, self.host_dtype or self.weight_dtype
        seen = limits.max_batch_tokens * past * (1 + self.weight_dtype.itemsize)
        return past * kv_numbers * 2 * (dtype.itemsize + self.weight_dtype.itemsize) + seen


def _inner_sizes(spec: ModelSpec) -> Iterable[int]:
    """Of all MLPs that a layer may have."""
    for layer in spec.layers:
        if layer.experts is None:
            yield spec.intermediate_size
        else:
            yield max(layer.experts.intermediate_size, layer.experts.shared_intermediate_size)
