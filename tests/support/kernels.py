"""Which instruction sets the kernels' tests run with: all that are compiled, those that can't run here skipped."""

import pytest

from svc_common import cpu_kernels

RUNNABLE = cpu_kernels.runnable_instruction_sets()

EACH_INSTRUCTION_SET = pytest.mark.parametrize(
    "instruction_set",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(name not in RUNNABLE, reason=f"NOT TESTED: this processor has no {name}"),
        )
        for name in cpu_kernels.compiled_instruction_sets()
    ],
)
