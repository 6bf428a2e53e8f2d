"""How large the programs of attention are on a GPU: from what it is, nothing is tried out while it serves.

`benchmarks/compile_kernels.py` compiles them all and shows registers, spills and shared memory.
"""

from dataclasses import dataclass

import torch

_ROOMY = frozenset({80, 87, 90, 100, 103})
"""Capabilities with 164 KiB of shared memory or more a processor. The others, but for Turing, have 100."""
_ROOMY_TILE_BYTES, _TILE_BYTES = 16 * 2**10, 8 * 2**10
"""Of keys where tensor cores multiply; as many again of values. With it a processor holds two programs of prompts and
four of decodes, which wait for memory in turn; those of heads of 256 numbers only one."""
_FMA_TILE_NUMBERS = 4096
"""Of keys elsewhere: a thread holds whole rows of both factors in registers, and more would spill."""
_STAGES = 3
"""The next tile but one's block numbers come while the next one's keys and values do."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What launches depend on."""

    capability: int
    """Compute capability: 86 for 8.6."""
    num_processors: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """On device cpu Triton's interpreter computes, and the kernels are those of an A100."""
        if device.type != "cuda":
            return cls(capability=80, num_processors=8)
        properties = torch.cuda.get_device_properties(device)
        return cls(10 * properties.major + properties.minor, properties.multi_processor_count)

    def has_tensor_cores(self, dtype: torch.dtype) -> bool:
        """That Triton multiplies this type with, unrounded: 16 bits, and Turing's no more."""
        return self.capability >= 80 and dtype.itemsize == 2

    def prefers_torch_prefill(self, dtype: torch.dtype) -> bool:
        """Turing: torch's kernels do use its tensor cores, eight times the rate of what Triton compiles for it."""
        return self.capability < 80 and dtype.itemsize == 2


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    prefill_rows: int
    """Query heads times tokens of a program."""
    tile: int
    """Tokens attended to at a time, a power of 2."""
    prefill_warps: int
    decode_warps: int
    num_stages: int = _STAGES

    @classmethod
    def of(cls, gpu: Gpu, dim_pad: int, dtype: torch.dtype) -> "AttentionLaunch":
        """For heads of `dim_pad` numbers, a power of 2, computed in `dtype`."""
        if not gpu.has_tensor_cores(dtype):
            return cls(prefill_rows=32, tile=min(_FMA_TILE_NUMBERS // dim_pad, 32), prefill_warps=8, decode_warps=8)
        tile_bytes = _ROOMY_TILE_BYTES if gpu.capability in _ROOMY else _TILE_BYTES
        return cls(
            prefill_rows=64,
            tile=min(max(tile_bytes // (dim_pad * dtype.itemsize), 32), 128),
            # The sums of 64 rows of 256 numbers take half of four warps' registers.
            prefill_warps=8 if dim_pad > 128 else 4,
            decode_warps=4,
        )
