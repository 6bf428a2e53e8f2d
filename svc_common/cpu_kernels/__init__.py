"""What runs on the CPU at its full speed: kernels in C++, compiled once per instruction set, and their threads."""

from svc_common.cpu_kernels._kernels import (
    DecoderLinear,
    PackedLinear,
    ThreadPool,
    argmax_rows,
    choose_instruction_set,
    decode_attention,
    runnable_instruction_sets,
    runnable_linear_instruction_sets,
)

__all__ = [
    "DecoderLinear",
    "PackedLinear",
    "ThreadPool",
    "argmax_rows",
    "choose_instruction_set",
    "decode_attention",
    "runnable_instruction_sets",
    "runnable_linear_instruction_sets",
]
