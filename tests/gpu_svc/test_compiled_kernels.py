"""What Triton compiles for a GPU that is not here. The interpreter, which other tests use, shows nothing of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = {"decode", "prefill", "combine", "norm", "rotate", "silu_gate", "append", "cut", "mass", "pick"}


def test_kernels_of_llama_3_fit_an_a10g(tmp_path: Path) -> None:
    """All shapes and GPUs: benchmarks/compile_kernels.py without arguments, some minutes."""
    found = tmp_path / "compiled.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "benchmarks/compile_kernels.py", "--quick", "--capability", "86", "--json", str(found)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = json.loads(found.read_text())
    assert {one["kernel"].removesuffix("_kernel") for one in compiled} == KERNELS
    # RMSNorm has three kinds: of a row, of a sum and of heads. No other one depends on the lengths it is launched with.
    assert len(compiled) == len(KERNELS) + 2
    for one in compiled:
        assert one["spilled_bytes"] == 0
        assert one["shared_bytes"] <= 99 * 1024
        if one["kernel"] in ("decode_kernel", "prefill_kernel"):
            assert one["tensor_core_products"] > 0
            # So that a processor of 100 KiB holds two programs of prompts and four of decodes, each with 1 KiB more.
            assert one["shared_bytes"] <= (49 if one["kernel"] == "prefill_kernel" else 24) * 1024
