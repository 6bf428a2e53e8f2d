"""Compiles the Triton kernels for GPUs that need not be here, as serving launches them, and shows the outcome.

The launches are the executor's own (attention, layers' operations, sampling), on small tensors of the CPU; instead of
being run each is compiled by Triton and the `ptxas` that it brings. Of each kernel: registers, bytes spilled, shared
memory, products by tensor cores, and loads from global memory: those of 16 bytes a thread, and others.

    python benchmarks/compile_kernels.py [--capability 75 86] [--quick] [--json FILE]

`--quick` is what `make test` compiles. Exit code 1 where a kernel spills, needs more shared memory than there is,
misses the tensor cores, or reads keys and values in small pieces. Not for TRITON_INTERPRET=1.
"""

import argparse
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from gpu_svc.attention.launches import AttentionLaunch, Gpu
from gpu_svc.attention.triton_backend import TritonAttention
from gpu_svc.sampling import SamplingRows
from gpu_svc.triton_ops import TritonOps, append_kv
from gpu_svc.triton_sampling import sample_on_device
from svc_common.decoder.dtypes import DTYPES
from svc_common.model.spec import ModelSpec, RopeSpec
from svc_common.model.weight_types import FloatTypeName

SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""That one program may use, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
NAMES = {75: "T4", 80: "A100", 86: "A10G", 89: "L4, 4090", 90: "H100, H200"}
BLOCK_TOKENS = 16
VOCAB_SIZE = 128_256
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """What the variants of a kernel depend on."""

    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    dtype: FloatTypeName
    kv_dtype: FloatTypeName
    window: int | None = None
    softcap: float = 0.0

    @property
    def label(self) -> str:
        kv = "" if self.kv_dtype == self.dtype else f", KV {self.kv_dtype}"
        extras = f"{', window' if self.window else ''}{', cap' if self.softcap else ''}"
        return f"{self.head_dim} x {self.num_q_heads}/{self.num_kv_heads} {self.dtype}{kv}{extras}"

    def spec(self) -> ModelSpec:
        return ModelSpec(
            architecture="llama",
            num_layers=1,
            hidden_size=self.head_dim * self.num_q_heads,
            intermediate_size=14336,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=VOCAB_SIZE,
            context_tokens=8192,
            norm_eps=1e-5,
            rope=RopeSpec(1e4, self.head_dim),
            tie_embeddings=True,
            eos_token_ids=(2,),
            checkpoint_dtype="bf16",
            sliding_window=self.window,
            attention_softcap=self.softcap,
        )


LLAMA_3 = Shape(128, 32, 8, "bf16", "bf16")
SHAPES = (
    LLAMA_3,
    Shape(128, 32, 8, "fp16", "fp16"),
    Shape(128, 32, 8, "fp32", "fp32"),
    Shape(128, 32, 8, "fp16", "bf16"),
    Shape(128, 32, 8, "bf16", "fp16"),
    Shape(128, 32, 8, "bf16", "fp32"),
    Shape(128, 32, 32, "fp16", "fp16"),  # Llama 2
    Shape(128, 64, 8, "bf16", "bf16"),  # Llama 3 70B
    Shape(128, 32, 8, "bf16", "bf16", window=4096),  # Mistral
    Shape(64, 32, 8, "bf16", "bf16"),  # Llama 3.2 1B
    Shape(64, 9, 3, "bf16", "bf16"),  # SmolLM2
    Shape(64, 9, 3, "fp32", "fp32"),
    Shape(64, 32, 32, "fp16", "fp16"),  # OPT
    Shape(80, 32, 32, "fp16", "fp16"),
    Shape(96, 32, 32, "bf16", "bf16", window=2047),  # Phi-3
    Shape(256, 8, 4, "bf16", "bf16", window=4096, softcap=50.0),  # Gemma 2
    Shape(256, 8, 4, "fp16", "fp16", window=4096, softcap=50.0),
    Shape(256, 4, 1, "fp32", "fp32", window=512),  # Gemma 3
)


@dataclass(frozen=True)
class Compiled:
    kernel: str
    capability: int
    shape: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core_products: int
    wide_loads: int
    """Instructions that bring 16 bytes a thread from global memory."""
    narrow_loads: int
    """The others. Attention has a few, for block tables."""
    problems: tuple[str, ...]


class _Driver:
    """Stands for a GPU that is not here."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_instead_of_run(capability: int) -> Iterator[list[tuple[str, Any, str]]]:
    """(kernel, what Triton made of it, ptxas's remarks) of each launch that is not one that was compiled before."""
    launches: list[tuple[str, Any, str]] = []
    original: Any = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        remarks = io.StringIO()
        with redirect_stdout(remarks):
            kernel = original(self, *args, grid=grid, warmup=True, **options)
        if remarks.getvalue():
            launches.append((self.__name__, kernel, remarks.getvalue()))
        return kernel

    driver.set_active(_Driver(capability))
    JITFunction.run = run
    try:
        with tempfile.TemporaryDirectory() as directory:
            triton.knobs.cache.dir = directory
            triton.knobs.nvidia.dump_ptxas_log = True
            yield launches
    finally:
        JITFunction.run = original


def launch_attention(shape: Shape, capability: int) -> None:
    dtype, heads, kv_heads, head_dim = DTYPES[shape.dtype], shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    attention = TritonAttention(shape.spec(), BLOCK_TOKENS, dtype, _CPU, Gpu(capability, 80))
    blocks = torch.zeros(4, 2, kv_heads, BLOCK_TOKENS * head_dim, dtype=DTYPES[shape.kv_dtype])
    q = torch.zeros(16, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
    out = torch.zeros(16, heads, head_dim, dtype=dtype)
    # Lengths of all kinds that Triton would compile for separately if it were told to: 1, multiples of 16, others.
    for context_tokens in (20, 16, 1):
        attention.decode(np.full(3, context_tokens), np.zeros((3, 2), np.int32)).run(0, q[:3], blocks, out[:3])
    for start, num_tokens in ((0, 3), (16, 1), (5, 16)):
        attention.prefill(start, num_tokens, np.zeros(2, np.int32)).run(0, q[:num_tokens], blocks, out[:num_tokens])


def launch_layers(shape: Shape) -> None:
    dtype, heads, kv_heads, head_dim = DTYPES[shape.dtype], shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    ops, spec = TritonOps(), shape.spec()
    hidden, weight = torch.zeros(3, spec.hidden_size, dtype=dtype), torch.zeros(spec.hidden_size, dtype=dtype)
    ops.rms_norm(hidden, weight, 1e-5)
    ops.add_rms_norm_(hidden, hidden.clone(), weight, 1e-5)
    qkv = torch.zeros(3, heads + 2 * kv_heads, head_dim, dtype=dtype)
    ops.rms_norm(qkv[:, :heads], torch.zeros(head_dim, dtype=dtype), 1e-5)
    angles = torch.zeros(3, 1, head_dim // 2, dtype=dtype)
    ops.rotate_(qkv[:, : heads + kv_heads], angles, angles)
    ops.silu_gate(torch.zeros(3, 2 * spec.intermediate_size, dtype=dtype))
    blocks = torch.zeros(4, 2, kv_heads, BLOCK_TOKENS * head_dim, dtype=DTYPES[shape.kv_dtype])
    index = torch.zeros(3, dtype=torch.int64)
    append_kv(blocks, index, index, qkv[:, heads:].view(3, 2, kv_heads, head_dim))


def launch_sampling(quick: bool) -> None:
    for top_p in (0.9,) if quick else (1.0, 0.9):
        columns = (np.ones(2, "f4"), np.zeros(2, "i4"), np.full(2, top_p, "f4"), np.zeros(2, "f4"))
        rows = SamplingRows(*columns, np.zeros(2, "u8"), np.zeros(2, "i8"), np.full(2, -1, "i4"))
        sample_on_device(torch.zeros(2, VOCAB_SIZE), rows)


def examine(name: str, kernel: Any, remarks: str, capability: int, shape: Shape) -> Compiled:
    ptx = kernel.asm["ptx"]
    registers, spilled = (
        int(match[1]) for match in (_found(r"Used (\d+) registers", remarks), _found(_SPILLS, remarks))
    )
    products = len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx))
    is_attention = name in ("prefill_kernel", "decode_kernel")
    wide, every = (len(re.findall(pattern, ptx)) for pattern in (_WIDE_LOAD, _LOAD))
    problems = []
    if kernel.metadata.shared > SHARED_BYTES[capability]:
        problems.append("too much shared memory")
    if spilled:
        problems.append("spills")
    if is_attention and not products and Gpu(capability, 1).has_tensor_cores(DTYPES[shape.dtype]):
        problems.append("no tensor cores")
    # Without asynchronous copies each thread looks up the block of each token by itself.
    too_many = every - wide > wide and capability >= 80
    wide_bytes = wide * _WIDE_BYTES * 32 * kernel.metadata.num_warps
    if is_attention and (too_many or wide_bytes < _tile_bytes(shape, capability)):
        problems.append("narrow loads")
    return Compiled(
        name,
        capability,
        shape.label,
        registers,
        spilled,
        kernel.metadata.shared,
        products,
        wide,
        every - wide,
        tuple(problems),
    )


def _tile_bytes(shape: Shape, capability: int) -> int:
    """Of the keys and values that a program brings at a time."""
    dim_pad, dtype = triton.next_power_of_2(shape.head_dim), DTYPES[shape.dtype]
    tile = AttentionLaunch.of(Gpu(capability, 1), dim_pad, dtype).tile
    return int(2 * tile * dim_pad * DTYPES[shape.kv_dtype].itemsize)


_WIDE_BYTES = 16
_SPILLS = r"(\d+) bytes spill stores"
_LOAD = r"\b(?:ld\.global|cp\.async\.c[ag]\.shared\.global)\b"
_WIDE_LOAD = r"\bld\.global\S*\.v4\.b32|\bcp\.async\.cg\.shared\.global"


def _found(pattern: str, text: str) -> re.Match[str]:
    found = re.search(pattern, text)
    assert found, f"ptxas no longer says {pattern!r}"
    return found


def compile_all(capability: int, quick: bool) -> Iterator[Compiled]:
    """`quick`: the kernels of Llama 3 in the GPU's own 16-bit type."""
    shapes = tuple(shape for shape in SHAPES if capability >= 80 or "bf16" not in (shape.dtype, shape.kv_dtype))
    with compiled_instead_of_run(capability) as launches:
        for shape in shapes[:1] if quick else shapes:
            launch_attention(shape, capability)
            yield from (examine(*launch, capability, shape) for launch in launches)
            launches.clear()
        for shape in shapes[:1] if quick else shapes[:3]:
            launch_layers(shape)
            launch_sampling(quick)
            yield from (examine(*launch, capability, shape) for launch in launches)
            launches.clear()


def _line(one: Compiled) -> str:
    return (
        f"{NAMES[one.capability]:12} {one.kernel.removesuffix('_kernel'):10} {one.shape:32} {one.registers:9} "
        f"{one.spilled_bytes:8} {one.shared_bytes:7} {one.tensor_core_products:9} {one.wide_loads:12} "
        f"{one.narrow_loads:7}  {', '.join(one.problems)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=sorted(SHARED_BYTES), choices=sorted(SHARED_BYTES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    compiled = []
    print(f"{'GPU':12} {'kernel':10} {'shape':32} registers  spilled  shared  products  loads of 16  others  problems")
    for capability in args.capability:
        for one in compile_all(capability, args.quick):
            compiled.append(one)
            print(_line(one), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in compiled], indent=1))
    return 1 if any(one.problems for one in compiled) else 0


if __name__ == "__main__":
    sys.exit(main())
