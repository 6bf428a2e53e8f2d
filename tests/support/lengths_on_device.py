"""Decode attention that reads lengths and tables on the device, in plain torch: a stand-in for Triton's, which is slow
in its interpreter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_svc.attention import TorchAttention
from gpu_svc.kv_cache import KvShape
from gpu_svc.kv_layout import KvBlocks, by_token
from svc_common.model.spec import ModelSpec


class LengthsOnDevice(TorchAttention):
    def decode_on_device(self, context_tokens: Tensor, block_tables: Tensor, longest: int) -> "_Decode":  # type: ignore[override]
        return _Decode(self._spec, context_tokens, block_tables)


@dataclass(frozen=True, slots=True)
class _Decode:
    spec: ModelSpec
    context: Tensor  # [n]
    tables: Tensor  # [n, stride]

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        """Over all that the tables name, of which the lengths hide the rest."""
        spec = self.spec
        kv = by_token(KvBlocks(layer_blocks[self.tables.long()]), spec.head_dim).permute(2, 0, 3, 1, 4, 5)
        keys, values = kv.flatten(3, 4).repeat_interleave(spec.num_q_heads // spec.num_kv_heads, 2).double()
        scores = torch.einsum("nhd,nhkd->nhk", q.double(), keys) * spec.softmax_scale
        if cap := spec.attention_softcap:
            scores = cap * (scores / cap).tanh()
        positions, ends = torch.arange(keys.shape[2]), self.context[:, None]
        first = ends - (spec.layer(layer).sliding_window or keys.shape[2])
        scores = scores.masked_fill(((positions >= ends) | (positions < first))[:, None], float("-inf"))
        out.copy_(torch.einsum("nhk,nhkd->nhd", scores.softmax(-1), values))


def make_backend(spec: ModelSpec, shape: KvShape, dtype: torch.dtype, device: torch.device) -> LengthsOnDevice:
    """In the place of gpu_svc.attention.make_backend."""
    return LengthsOnDevice(spec, shape.block_tokens, dtype, device)
