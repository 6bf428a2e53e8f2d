"""Attention by the Triton kernels, on KV where it lies in the cache; nothing is gathered."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gpu_svc.attention.backend import PrefillAttention
from gpu_svc.attention.launches import AttentionLaunch, Gpu
from gpu_svc.attention.torch_backend import TorchAttention
from gpu_svc.kv_layout import KvBlocks, pairs_keys
from gpu_svc.packed_arrays import to_device, upload
from gpu_svc.triton_kernels.attention import combine_kernel, decode_kernel, prefill_kernel
from svc_common.model.spec import ModelSpec

_MIN_DOT = 16
"""Least rows, columns and depth of a tile that `tl.dot` takes."""
_MIN_SPLIT_TOKENS = 256
_PROGRAMS_PER_PROCESSOR = 4
_COMBINED_SPLITS = 16
_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class _Constants:
    """What all launches of a model share."""

    head_dim: int
    group: int
    num_kv_heads: int
    block_tokens: int
    dtype: torch.dtype
    scale: float
    softcap: float
    windows: tuple[int, ...]
    """By layer; 0: none."""
    gpu: Gpu

    @property
    def num_processors(self) -> int:
        return self.gpu.num_processors

    @property
    def dim_pad(self) -> int:
        # Paired keys are multiplied half by half.
        return max(_padded(self.head_dim), 2 * _MIN_DOT)

    @cached_property
    def launch(self) -> AttentionLaunch:
        return AttentionLaunch.of(self.gpu, self.dim_pad, self.dtype)

    @cached_property
    def _of_all_calls(self) -> dict[str, object]:
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "HEAD_DIM": self.head_dim,
            "DIM_PAD": self.dim_pad,
            "GROUP": self.group,
            "BLOCK_TOKENS": self.block_tokens,
            "RUN": gcd(self.block_tokens, self.launch.tile),
            "TILE": self.launch.tile,
            "HAS_SOFTCAP": self.softcap > 0,
            # The interpreter takes 16-bit factors for what they are not.
            "DOT_TYPE": tl.float32 if triton.knobs.runtime.interpret else _DOT_TYPES[self.dtype],
            "num_stages": self.launch.num_stages,
        }

    def of_call(self, layer_blocks: Tensor, layer: int, rows: int, num_warps: int) -> dict[str, object]:
        """Arguments by name that both kernels of attention take."""
        return {
            **self._of_all_calls,
            "window": self.windows[layer],
            "block_stride": layer_blocks.stride(0),
            "value_offset": layer_blocks.stride(1),
            "PAIRED_KEYS": pairs_keys(layer_blocks.dtype),
            "ROWS": rows,
            "HAS_WINDOW": self.windows[layer] > 0,
            "num_warps": num_warps,
        }


class TritonAttention:
    """The backend of device cuda; on the CPU's tensors with TRITON_INTERPRET=1."""

    reads_tails = False

    def __init__(
        self, spec: ModelSpec, block_tokens: int, dtype: torch.dtype, device: torch.device, gpu: Gpu | None = None
    ) -> None:
        """`dtype` is the compute type; the cache's own may differ. `gpu` to launch for: by default what `device` is.

        Raises ValueError for heads of an odd size, whose keys don't come in pairs.
        """
        if spec.head_dim % 2:
            raise ValueError(f"heads of {spec.head_dim} numbers: the kernels take even sizes")
        self._device = device
        self._torch = TorchAttention(spec, block_tokens, dtype, device)
        self._constants = _Constants(
            spec.head_dim,
            spec.num_q_heads // spec.num_kv_heads,
            spec.num_kv_heads,
            block_tokens,
            dtype,
            spec.softmax_scale,
            spec.attention_softcap,
            tuple(layer.sliding_window for layer in spec.layers),
            gpu or Gpu.of(device),
        )

    def decode(self, context_tokens: NDArray[np.int64], block_tables: NDArray[np.int32]) -> "_TritonDecode":
        context, tables = to_device([context_tokens.astype(np.int32), block_tables], self._device)
        return self.decode_on_device(context, tables, int(context_tokens.max()))

    def decode_on_device(self, context_tokens: Tensor, block_tables: Tensor, longest: int) -> "_TritonDecode":
        return _TritonDecode(self._constants, context_tokens, block_tables, longest)

    def prefill(self, start: int, num_tokens: int, blocks: NDArray[np.int32]) -> PrefillAttention:
        if self._constants.gpu.prefers_torch_prefill(self._constants.dtype):
            return self._torch.prefill(start, num_tokens, blocks)
        return _TritonPrefill(self._constants, self._torch, start, num_tokens, blocks, self._device)


class _TritonDecode:
    """Contexts are cut into parts until the device has programs enough; how many depends on no single length."""

    def __init__(self, constants: _Constants, context_tokens: Tensor, block_tables: Tensor, longest: int) -> None:
        self._constants = constants
        self._context = context_tokens
        self._tables = block_tables
        num_heads = constants.group * constants.num_kv_heads
        self._num_splits = {window: self._splits(window, longest) for window in set(constants.windows)}
        parts = (len(context_tokens), num_heads, max(self._num_splits.values()))
        device = context_tokens.device
        self._summed = torch.empty((*parts, constants.head_dim), dtype=torch.float32, device=device)
        self._logs = torch.empty(parts, dtype=torch.float32, device=device)

    def _splits(self, window: int, longest: int) -> int:
        constants = self._constants
        most_seen = min(longest, window) if window else longest
        num_programs = len(self._context) * constants.num_kv_heads
        wanted = -(-constants.num_processors * _PROGRAMS_PER_PROCESSOR // num_programs)
        return max(1, min(wanted, -(-most_seen // _MIN_SPLIT_TOKENS)))

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        constants = self._constants
        num_splits = self._num_splits[constants.windows[layer]]
        num_sequences = len(self._context)
        decode_kernel[num_sequences, constants.num_kv_heads, num_splits](
            q,
            layer_blocks,
            self._tables,
            self._context,
            self._summed,
            self._logs,
            min_split_tokens=_MIN_SPLIT_TOKENS,
            q_token_stride=q.stride(0),
            table_stride=self._tables.stride(0),
            **constants.of_call(
                layer_blocks, layer, max(_padded(constants.group), _MIN_DOT), constants.launch.decode_warps
            ),
        )
        combine_kernel[num_sequences, constants.group * constants.num_kv_heads](
            self._summed,
            self._logs,
            out,
            out_token_stride=out.stride(0),
            num_splits=num_splits,
            HEAD_DIM=constants.head_dim,
            DIM_PAD=constants.dim_pad,
            SPLITS=_COMBINED_SPLITS,
        )


class _TritonPrefill:
    def __init__(
        self,
        constants: _Constants,
        on_host: TorchAttention,
        start: int,
        num_tokens: int,
        blocks: NDArray[np.int32],
        device: torch.device,
    ) -> None:
        self._constants = constants
        self._reference = on_host
        self._chunk = (start, num_tokens, blocks)
        self._device = device

    @cached_property
    def _table(self) -> Tensor:
        return upload(self._chunk[2], self._device)

    @cached_property
    def _on_host(self) -> PrefillAttention:
        return self._reference.prefill(*self._chunk)

    def run(self, layer: int, q: Tensor, layer_blocks: Tensor, out: Tensor) -> None:
        constants, (start, num_tokens, _) = self._constants, self._chunk
        rows = constants.launch.prefill_rows
        num_tiles = -(-num_tokens * constants.group // rows)
        prefill_kernel[num_tiles, constants.num_kv_heads](
            q,
            layer_blocks,
            self._table,
            out,
            start,
            num_tokens,
            q_token_stride=q.stride(0),
            out_token_stride=out.stride(0),
            **constants.of_call(layer_blocks, layer, rows, constants.launch.prefill_warps),
        )

    def run_on_host(self, layer: int, q: Tensor, layer_blocks: KvBlocks, kv: Tensor, out: Tensor) -> None:
        """The past comes over the link, and torch attends to it."""
        self._on_host.run_on_host(layer, q, layer_blocks, kv, out)


def _padded(number: int) -> int:
    """The next power of 2, as shapes of tiles must be."""
    return 1 << (number - 1).bit_length()
