"""Where the layers of a model run when its weights may not fit on the GPU: the policies of FlexInfer, as values.

A model's L layers lie in this order, for prefill and for decode each:

    0 ... cpu_layers - 1                computed by cpu_attn_svc: linear operations and attention
    cpu_layers ... L - resident - 1     computed by gpu_svc, their weights streamed from host memory in each iteration
    L - resident ... L - 1              computed by gpu_svc, their weights resident on the device

FlexInfer (MLSys 2025) names the corners: CPU-only is cpu_layers = L, GPU with offloading is cpu_layers = 0 with fewer
than L resident, static partition is what lies between. All resident and nothing on the CPU is where NEO's modes apply.
"""

from dataclasses import dataclass
from enum import Enum


class PolicyKind(Enum):
    """Of one phase."""

    RESIDENT = "resident"
    OFFLOAD = "offload"
    PARTITION = "partition"
    CPU_ONLY = "cpu_only"


@dataclass(frozen=True, slots=True)
class ExecutionPolicy:
    """Of one epoch. KV of the first `decode_cpu_layers` layers lies where they decode: in host memory."""

    resident_layers: int
    """Of both phases: the last so many."""
    prefill_cpu_layers: int = 0
    decode_cpu_layers: int = 0

    def check(self, num_layers: int) -> None:
        """Raises ValueError naming the field, for a model of so many layers."""
        for name in ("resident_layers", "prefill_cpu_layers", "decode_cpu_layers"):
            value = getattr(self, name)
            if not 0 <= value <= num_layers:
                raise ValueError(f"{name} must be in [0, {num_layers}], is {value}")
        on_cpu_always = min(self.prefill_cpu_layers, self.decode_cpu_layers)
        if self.resident_layers + on_cpu_always > num_layers:
            raise ValueError(
                f"resident_layers must be at most {num_layers - on_cpu_always}: no phase computes the others on the "
                f"GPU; is {self.resident_layers}"
            )

    def kind(self, cpu_layers: int, num_layers: int) -> PolicyKind:
        """Of a phase that runs so many layers on the CPU."""
        if cpu_layers == num_layers:
            return PolicyKind.CPU_ONLY
        if cpu_layers > 0:
            return PolicyKind.PARTITION
        return PolicyKind.RESIDENT if self.resident_layers == num_layers else PolicyKind.OFFLOAD
