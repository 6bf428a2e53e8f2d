"""What runs on the CPU at its full speed: kernels in C++, compiled once per instruction set, and their threads."""

from svc_common.cpu_kernels._kernels import (
    NO_SOFTCAP,
    Attention,
    DecoderLinear,
    DecodeWork,
    PackedLinear,
    PrefillWork,
    ThreadPool,
    argmax_rows,
    choose_instruction_set,
    compiled_instruction_sets,
    copy_blocks,
    fma_peak,
    read_ceiling,
    runnable_instruction_sets,
    runnable_linear_instruction_sets,
    write_kv,
)

__all__ = [
    "NO_SOFTCAP",
    "Attention",
    "DecodeWork",
    "DecoderLinear",
    "PackedLinear",
    "PrefillWork",
    "ThreadPool",
    "argmax_rows",
    "choose_instruction_set",
    "compiled_instruction_sets",
    "copy_blocks",
    "fma_peak",
    "read_ceiling",
    "runnable_instruction_sets",
    "runnable_linear_instruction_sets",
    "write_kv",
]
